"""Digits as strokes in six fonts, and an atlas of the distance to them.

A glyph is a set of polylines in a box 0.6 wide and 1 high, y pointing down. The atlas holds, for
each font and digit, how far each point of a square around the box is from the nearest stroke, in
units of the glyph's height: sampled anywhere and cut at any distance, it gives the digit in any
stroke width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

WIDTH = 0.6
HALF_EXTENT = 0.75
"""Half the side of the square that the atlas covers around a glyph's centre, in glyph heights."""
ATLAS_SIDE = 48

Stroke = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Font:
    degrees_per_point: float = 12.0
    """How finely curves are drawn; 45 makes them octagons."""
    roundness: float = 1.0
    """1 draws ellipses; below it curves fill their corners."""
    pen: float = 1.0
    """Above 1, horizontal strokes are thinner than vertical ones by this factor."""
    flagged_one: bool = True
    footed_one: bool = False
    flat_three: bool = False
    open_four: bool = False
    straight_six: bool = False
    crossed_seven: bool = False

    def arc(
        self, x: float, y: float, radius_x: float, radius_y: float, begin: float, end: float
    ) -> Stroke:
        """Part of an ellipse, in degrees from the right by way of the bottom."""
        points = max(2, math.ceil(abs(end - begin) / self.degrees_per_point) + 1)
        stroke = []
        for index in range(points):
            angle = math.radians(begin + (end - begin) * index / (points - 1))
            across, down = math.cos(angle), math.sin(angle)
            stroke.append(
                (
                    x + radius_x * math.copysign(abs(across) ** self.roundness, across),
                    y + radius_y * math.copysign(abs(down) ** self.roundness, down),
                )
            )
        return stroke

    def strokes(self, digit: int) -> list[Stroke]:
        draw = (
            self._zero, self._one, self._two, self._three, self._four,
            self._five, self._six, self._seven, self._eight, self._nine,
        )  # fmt: skip
        return draw[digit]()

    def _zero(self) -> list[Stroke]:
        return [self.arc(0.3, 0.5, 0.29, 0.5, 0, 360)]

    def _one(self) -> list[Stroke]:
        strokes: list[Stroke] = [[(0.34, 0.0), (0.34, 1.0)]]
        if self.flagged_one:
            strokes.append([(0.34, 0.0), (0.1, 0.22)])
        if self.footed_one:
            strokes.append([(0.12, 1.0), (0.56, 1.0)])
        return strokes

    def _two(self) -> list[Stroke]:
        return [[*self.arc(0.3, 0.28, 0.28, 0.28, 190, 390), (0.02, 1.0), (0.58, 1.0)]]

    def _three(self) -> list[Stroke]:
        if self.flat_three:
            return [[(0.04, 0.0), (0.54, 0.0), *self.arc(0.27, 0.69, 0.3, 0.31, -90, 145)]]
        upper = self.arc(0.28, 0.25, 0.26, 0.25, -155, 90)
        return [upper + self.arc(0.28, 0.74, 0.3, 0.26, -90, 155)]

    def _four(self) -> list[Stroke]:
        if self.open_four:
            return [[(0.1, 0.0), (0.03, 0.6), (0.58, 0.6)], [(0.44, 0.25), (0.44, 1.0)]]
        return [[(0.46, 1.0), (0.46, 0.0), (0.0, 0.7), (0.6, 0.7)]]

    def _five(self) -> list[Stroke]:
        return [
            [(0.54, 0.0), (0.1, 0.0), (0.07, 0.45), *self.arc(0.27, 0.67, 0.3, 0.33, -130, 145)]
        ]

    def _six(self) -> list[Stroke]:
        bowl = self.arc(0.3, 0.69, 0.28, 0.31, 0, 360)
        if self.straight_six:
            return [bowl, [(0.42, 0.0), (0.06, 0.58)]]
        return [bowl, self.arc(0.5, 0.69, 0.48, 0.69, 180, 275)]

    def _seven(self) -> list[Stroke]:
        strokes: list[Stroke] = [[(0.02, 0.0), (0.58, 0.0), (0.22, 1.0)]]
        if self.crossed_seven:
            strokes.append([(0.16, 0.5), (0.56, 0.5)])
        return strokes

    def _eight(self) -> list[Stroke]:
        upper = self.arc(0.3, 0.24, 0.24, 0.24, 0, 360)
        return [upper, self.arc(0.3, 0.74, 0.29, 0.26, 0, 360)]

    def _nine(self) -> list[Stroke]:
        return [[(WIDTH - x, 1 - y) for x, y in stroke] for stroke in self._six()]


FONTS = (
    Font(),
    Font(pen=1.7, footed_one=True),
    Font(roundness=0.6, flagged_one=False, flat_three=True, straight_six=True),
    Font(degrees_per_point=45.0, open_four=True),
    Font(roundness=0.8, crossed_seven=True, open_four=True, straight_six=True),
    Font(pen=0.7, roundness=1.15, flat_three=True, footed_one=True),
)


@lru_cache(maxsize=1)
def distance_atlas() -> Tensor:
    """Distances as (font * 10 + digit, row, column), rows and columns spanning the square."""
    ticks = torch.linspace(-HALF_EXTENT, HALF_EXTENT, ATLAS_SIDE, dtype=torch.float64)
    glyphs = [
        _distance(font.strokes(digit), font.pen, ticks) for font in FONTS for digit in range(10)
    ]
    return torch.stack(glyphs).to(torch.float32)


def _distance(strokes: list[Stroke], pen: float, ticks: Tensor) -> Tensor:
    """From each point of the grid to the nearest segment; the pen stretches the vertical part."""
    segments = torch.tensor(
        [(*begin, *end) for stroke in strokes for begin, end in pairwise(stroke)],
        dtype=torch.float64,
    )
    begin_x, begin_y = segments[:, 0] - WIDTH / 2, (segments[:, 1] - 0.5) * pen
    along_x, along_y = segments[:, 2] - segments[:, 0], (segments[:, 3] - segments[:, 1]) * pen
    from_x = ticks.view(1, -1, 1) - begin_x
    from_y = ticks.view(-1, 1, 1) * pen - begin_y
    length_squared = (along_x * along_x + along_y * along_y).clamp_min(1e-12)
    position = ((from_x * along_x + from_y * along_y) / length_squared).clamp(0, 1)
    off_x, off_y = from_x - position * along_x, from_y - position * along_y
    return (off_x * off_x + off_y * off_y).amin(dim=2).sqrt()
