"""Digits as strokes in six fonts, and an atlas of the distance to them.

A glyph is a set of polylines in a box 0.6 wide and 1 high, y pointing down. The atlas holds, for
each font and digit, how far each point of a square around the box is from the nearest stroke, in
units of the glyph's height: sampled anywhere and cut at any distance, it gives the digit in any
stroke width.

Draws chunks of images of one digit each: as on a house among whatever surrounds it, or plain.

Images are a function of the generator alone, bit for bit and whatever the number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

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


DRAWING_VERSION = 1
"""Raise it with every change to what is drawn, so that no older cache is taken for the new set."""


class _Dice:
    """Random numbers, one for each sample of a chunk, that spread over (samples, rows, columns)."""

    def __init__(self, samples: int, generator: Generator) -> None:
        self.samples = samples
        self.generator = generator

    def uniform(self, low: float, high: float) -> Tensor:
        drawn = torch.rand(self.samples, 1, 1, generator=self.generator)
        return drawn * (high - low) + low

    def either_side(self, most: float) -> Tensor:
        return self.uniform(-most, most)

    def chance(self, probability: float) -> Tensor:
        return (self.uniform(0, 1) < probability).float()

    def whole(self, below: int) -> Tensor:
        return torch.randint(below, (self.samples,), generator=self.generator)

    def colour(self, brightness: Tensor, chroma: float) -> Tensor:
        """Colours as (samples, channels, 1, 1) around the brightness of each sample."""
        tint = torch.rand(self.samples, 3, 1, 1, generator=self.generator) - 0.5
        return (brightness.unsqueeze(1) + tint * chroma).clamp(0, 1)


@dataclass(frozen=True, slots=True)
class _Hand:
    """How differently digits are written: ranges that each sample's own are drawn from, evenly."""

    height_pixels: tuple[float, float]
    aspect: tuple[float, float]
    slant: float
    """Up to as much to either side, as are all that follow."""
    turn_radians: float
    shift_pixels: float
    has_neighbours: bool
    """Whether half of the digits have another one on their left, and half on their right."""


_STREET_HAND = _Hand((15, 26), (0.7, 1.2), 0.3, 0.28, 3, has_neighbours=True)
_PLAIN_HAND = _Hand((14, 22), (0.7, 1.2), 0.35, 0.25, 2.5, has_neighbours=False)


def draw_street_numbers(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """`samples` images as uint8 (samples, 3, 32, 32) and their labels.

    Any colour on any other: what a linear model sums up says little about them.
    """
    return _with_one_thread(_draw_street_numbers, samples, generator)


def draw_plain_digits(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """`samples` images as uint8 (samples, 1, 28, 28) and their labels: light strokes on black."""
    return _with_one_thread(_draw_plain_digits, samples, generator)


def _with_one_thread(
    draw: Callable[[int, Generator], tuple[Tensor, Tensor]], samples: int, generator: Generator
) -> tuple[Tensor, Tensor]:
    # How work is divided over threads can change a rounding; and of operations as small as these,
    # threads make slow ones where workers that start together outnumber the cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return draw(samples, generator)
    finally:
        torch.set_num_threads(threads)


def _plane(side: int) -> tuple[Tensor, Tensor]:
    """The places of the pixels' columns and rows, from the middle of the image."""
    ticks = torch.arange(side, dtype=torch.float32) - (side - 1) / 2
    return ticks.view(1, 1, side), ticks.view(1, side, 1)


def _draw_plain_digits(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    dice = _Dice(samples, generator)
    x, y = _plane(28)
    labels = dice.whole(10)
    distance, stroke = _number(labels, dice, x, y, _PLAIN_HAND)
    coverage = ((stroke - distance) / dice.uniform(0.8, 1.4) + 0.5).clamp_(0, 1)
    image = coverage.mul_(dice.uniform(0.7, 1)).unsqueeze(1)
    noise = torch.randn(image.shape, generator=generator).mul_(0.03)
    image.add_(noise).mul_(255).add_(0.5).clamp_(0, 255)
    return image.to(torch.uint8), labels


def _draw_street_numbers(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    dice = _Dice(samples, generator)
    x, y = _plane(32)
    labels = dice.whole(10)
    distance, stroke = _number(labels, dice, x, y, _STREET_HAND)

    contrast = dice.uniform(0.15, 0.7)
    brightness = dice.uniform(0.1, 0.9)
    ground = dice.colour(brightness, 0.35)
    sign = torch.where(
        brightness + contrast > 1,
        -1.0,
        torch.where(brightness < contrast, 1.0, dice.chance(0.5) * 2 - 1),
    )
    ink = dice.colour((brightness + sign * contrast).clamp(0, 1), 0.3)

    image = ground.expand(samples, 3, y.numel(), x.numel()).contiguous()
    _clutter(image, ground, contrast, dice, x, y)
    softness = dice.uniform(0.5, 1.3)
    coverage = ((stroke - distance) / softness + 0.5).clamp_(0, 1)
    outline = ((stroke + 1.6 - distance) / softness + 0.5).clamp_(0, 1) * dice.chance(0.2)
    _paint(image, outline, dice.colour((brightness - sign * contrast * 0.4).clamp(0, 1), 0.2))
    _paint(image, coverage, ink)
    _light(image, dice, x, y)
    _blur(image, dice.uniform(0, 0.3).unsqueeze(1))
    noise = torch.randn(image.shape, generator=generator).mul_(
        dice.uniform(0.005, 0.07).unsqueeze(1)
    )
    image.add_(noise).mul_(255).add_(0.5).clamp_(0, 255)
    return image.to(torch.uint8), labels


def _number(
    labels: Tensor, dice: _Dice, x: Tensor, y: Tensor, hand: _Hand
) -> tuple[Tensor, Tensor]:
    """Distance of each pixel to the strokes of the digit or its neighbours, and half a stroke."""
    side = x.numel()
    height = dice.uniform(*hand.height_pixels)
    aspect, slant = dice.uniform(*hand.aspect), dice.either_side(hand.slant)
    angle = dice.either_side(hand.turn_radians)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    centre_x, centre_y = dice.either_side(hand.shift_pixels), dice.either_side(hand.shift_pixels)
    advance = height * (aspect * WIDTH + dice.uniform(0.14, 0.4))
    font = dice.whole(len(FONTS)) * 10
    nearest: Tensor | None = None
    neighbours = [(place, dice.chance(0.5)) for place in (-1, 1) if hand.has_neighbours]
    for place, presence in [(0, None), *neighbours]:
        glyph = font + (labels if presence is None else dice.whole(10))
        from_x = x - (centre_x + place * advance * cosine)
        from_y = y - (centre_y + place * advance * sine)
        # The inverse of height * rotation * slant * aspect takes pixels back to the glyph's square.
        unit = height * HALF_EXTENT
        down = from_y * (cosine / unit) - from_x * (sine / unit)
        right = from_x * (cosine / unit) + from_y * (sine / unit) + down * slant
        grid = torch.empty(dice.samples, side, side, 2)
        torch.mul(right, 1 / aspect, out=grid.select(3, 0))
        grid.select(3, 1).copy_(down)
        plane = distance_atlas().index_select(0, glyph).view(-1, 1, ATLAS_SIDE, ATLAS_SIDE)
        sampled = F.grid_sample(plane, grid, padding_mode="border", align_corners=True)
        distance = sampled.squeeze(1).mul_(height)
        if presence is not None:
            distance.add_((1 - presence) * (4 * side))
        nearest = distance if nearest is None else torch.minimum(nearest, distance)
    assert nearest is not None
    return nearest, height * dice.uniform(0.045, 0.1)


def _clutter(
    image: Tensor, ground: Tensor, contrast: Tensor, dice: _Dice, x: Tensor, y: Tensor
) -> None:
    """What is on the wall behind the number: an edge between two grounds, and bars across it."""
    brightness = ground.mean(dim=1)
    for kind in ("edge", "bar", "bar"):
        angle = dice.uniform(0, 6.2832)
        away = x * torch.cos(angle) + y * torch.sin(angle) - dice.uniform(-13, 13)
        if kind == "bar":
            away = dice.uniform(0.4, 1.6) - away.abs()
        shade = brightness + contrast * dice.uniform(-0.7, 0.7)
        cover = (away + 0.5).clamp_(0, 1) * dice.chance(0.45)
        _paint(image, cover, dice.colour(shade.clamp(0, 1), 0.25))


def _light(image: Tensor, dice: _Dice, x: Tensor, y: Tensor) -> None:
    """Shade that deepens across the image, and in patches; it only ever darkens."""
    patches = torch.rand(dice.samples, 1, 5, 5, generator=dice.generator)
    side = x.numel()
    shade = F.interpolate(patches, size=(side, side), mode="bilinear", align_corners=True)
    shade = shade.squeeze(1) * dice.uniform(0, 0.45)
    for ticks in (x, y):
        slope = dice.uniform(-0.01, 0.01)
        shade += ticks * slope + (side / 2) * slope.abs()
    image.mul_((1 - shade).unsqueeze(1))


def _paint(image: Tensor, coverage: Tensor, colour: Tensor) -> None:
    """Lay a colour over the image, as densely as `coverage` (samples, rows, columns) says."""
    image.add_((colour - image).mul_(coverage.unsqueeze(1)))


def _blur(image: Tensor, weight: Tensor) -> None:
    """Mix each pixel with its neighbours, along rows and then along columns."""
    for dimension in (3, 2):
        length = image.shape[dimension] - 2
        before = image.narrow(dimension, 0, length)
        after = image.narrow(dimension, 2, length)
        inner = image.narrow(dimension, 1, length)
        mixed = ((before + after).mul_(0.5) - inner).mul_(weight * 2)
        inner.add_(mixed)
