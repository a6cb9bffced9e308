"""Rendering of the synthetic digit images: stroke fonts, and two styles of drawing them.

`draw_street_numbers` renders color house numbers with clutter, `draw_plain_digits` light digits on
black. Images are a bit-exact function of the random generator, for any number of threads.

A glyph is a set of polylines in a box 0.6 wide and 1 high, with y pointing down. For each font and
digit, the distance atlas holds the distance from each point of a square around the box to the
nearest stroke, in units of the glyph height. Thresholding an interpolated distance renders the
digit at any size and stroke width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

DRAWING_VERSION = 1
"""Increment with every change to the images, which invalidates the caches of users."""

WIDTH = 0.6
HALF_EXTENT = 0.75
"""Half the side of the square that the atlas covers around a glyph center, in glyph heights."""
ATLAS_SIDE = 48

Stroke = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Font:
    """Shapes of the ten digits."""

    degrees_per_point: float = 12.0
    """Resolution of curves; 45 turns circles into octagons."""
    roundness: float = 1.0
    """1 gives ellipses; smaller values give squarer curves."""
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
        """Return an elliptical arc; angles are in degrees, clockwise from the right."""
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
        """Return the polylines of a digit."""
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
    """Return distances of shape (font * 10 + digit, row, column) over the square."""
    ticks = torch.linspace(-HALF_EXTENT, HALF_EXTENT, ATLAS_SIDE, dtype=torch.float64)
    glyphs = [
        _distance(font.strokes(digit), font.pen, ticks) for font in FONTS for digit in range(10)
    ]
    return torch.stack(glyphs).to(torch.float32)


def _distance(strokes: list[Stroke], pen: float, ticks: Tensor) -> Tensor:
    """Return the distance of each grid point to the nearest segment; `pen` scales y."""
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


class _Random:
    """Random numbers, one per sample, that broadcast over (samples, rows, columns)."""

    def __init__(self, samples: int, generator: Generator) -> None:
        self.samples = samples
        self.generator = generator

    def uniform(self, low: float, high: float) -> Tensor:
        drawn = torch.rand(self.samples, 1, 1, generator=self.generator)
        return drawn * (high - low) + low

    def symmetric(self, limit: float) -> Tensor:
        return self.uniform(-limit, limit)

    def bernoulli(self, probability: float) -> Tensor:
        return (self.uniform(0, 1) < probability).float()

    def integers(self, below: int) -> Tensor:
        return torch.randint(below, (self.samples,), generator=self.generator)

    def color(self, brightness: Tensor, chroma: float) -> Tensor:
        """Return colors of shape (samples, channels, 1, 1) around the brightness of each sample."""
        tint = torch.rand(self.samples, 3, 1, 1, generator=self.generator) - 0.5
        return (brightness.unsqueeze(1) + tint * chroma).clamp(0, 1)


@dataclass(frozen=True, slots=True)
class _Style:
    """Ranges of the uniformly distributed parameters of a digit."""

    height_pixels: tuple[float, float]
    aspect: tuple[float, float]
    slant: float
    """Maximum in either direction, as for the next two."""
    turn_radians: float
    shift_pixels: float
    has_neighbors: bool
    """Whether another digit appears on the left, and on the right, with probability 1/2 each."""


_STREET_STYLE = _Style((15, 26), (0.7, 1.2), 0.3, 0.28, 3, has_neighbors=True)
_PLAIN_STYLE = _Style((14, 22), (0.7, 1.2), 0.35, 0.25, 2.5, has_neighbors=False)


def draw_street_numbers(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Return uint8 images of shape (samples, 3, 32, 32) and their labels.

    Any color appears on any other, so pixel sums tell a linear model little.
    """
    return _with_one_thread(_draw_street_numbers, samples, generator)


def draw_plain_digits(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Return uint8 images of shape (samples, 1, 28, 28), light strokes on black, and labels."""
    return _with_one_thread(_draw_plain_digits, samples, generator)


def _with_one_thread(
    draw: Callable[[int, Generator], tuple[Tensor, Tensor]], samples: int, generator: Generator
) -> tuple[Tensor, Tensor]:
    # The division of work over threads can change rounding, and threads slow down operations this
    # small when the workers that start together outnumber the cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return draw(samples, generator)
    finally:
        torch.set_num_threads(threads)


def _plane(side: int) -> tuple[Tensor, Tensor]:
    """Return the x and y coordinates of the pixels relative to the image center."""
    ticks = torch.arange(side, dtype=torch.float32) - (side - 1) / 2
    return ticks.view(1, 1, side), ticks.view(1, side, 1)


def _draw_plain_digits(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    random = _Random(samples, generator)
    x, y = _plane(28)
    labels = random.integers(10)
    distance, stroke = _number(labels, random, x, y, _PLAIN_STYLE)
    coverage = ((stroke - distance) / random.uniform(0.8, 1.4) + 0.5).clamp_(0, 1)
    image = coverage.mul_(random.uniform(0.7, 1)).unsqueeze(1)
    noise = torch.randn(image.shape, generator=generator).mul_(0.03)
    image.add_(noise).mul_(255).add_(0.5).clamp_(0, 255)
    return image.to(torch.uint8), labels


def _draw_street_numbers(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    random = _Random(samples, generator)
    x, y = _plane(32)
    labels = random.integers(10)
    distance, stroke = _number(labels, random, x, y, _STREET_STYLE)

    contrast = random.uniform(0.15, 0.7)
    brightness = random.uniform(0.1, 0.9)
    ground = random.color(brightness, 0.35)
    sign = torch.where(
        brightness + contrast > 1,
        -1.0,
        torch.where(brightness < contrast, 1.0, random.bernoulli(0.5) * 2 - 1),
    )
    ink = random.color((brightness + sign * contrast).clamp(0, 1), 0.3)

    image = ground.expand(samples, 3, y.numel(), x.numel()).contiguous()
    _clutter(image, ground, contrast, random, x, y)
    softness = random.uniform(0.5, 1.3)
    coverage = ((stroke - distance) / softness + 0.5).clamp_(0, 1)
    outline = ((stroke + 1.6 - distance) / softness + 0.5).clamp_(0, 1) * random.bernoulli(0.2)
    _paint(image, outline, random.color((brightness - sign * contrast * 0.4).clamp(0, 1), 0.2))
    _paint(image, coverage, ink)
    _light(image, random, x, y)
    _blur(image, random.uniform(0, 0.3).unsqueeze(1))
    noise = torch.randn(image.shape, generator=generator).mul_(
        random.uniform(0.005, 0.07).unsqueeze(1)
    )
    image.add_(noise).mul_(255).add_(0.5).clamp_(0, 255)
    return image.to(torch.uint8), labels


def _number(
    labels: Tensor, random: _Random, x: Tensor, y: Tensor, style: _Style
) -> tuple[Tensor, Tensor]:
    """Return the distance of each pixel to the nearest stroke, and half the stroke width."""
    side = x.numel()
    height = random.uniform(*style.height_pixels)
    aspect, slant = random.uniform(*style.aspect), random.symmetric(style.slant)
    angle = random.symmetric(style.turn_radians)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    center_x, center_y = random.symmetric(style.shift_pixels), random.symmetric(style.shift_pixels)
    advance = height * (aspect * WIDTH + random.uniform(0.14, 0.4))
    font = random.integers(len(FONTS)) * 10
    nearest: Tensor | None = None
    neighbors = [(offset, random.bernoulli(0.5)) for offset in (-1, 1) if style.has_neighbors]
    for offset, presence in [(0, None), *neighbors]:
        glyph = font + (labels if presence is None else random.integers(10))
        from_x = x - (center_x + offset * advance * cosine)
        from_y = y - (center_y + offset * advance * sine)
        # Map pixels to the atlas with the inverse of height * rotation * slant * aspect.
        unit = height * HALF_EXTENT
        down = from_y * (cosine / unit) - from_x * (sine / unit)
        right = from_x * (cosine / unit) + from_y * (sine / unit) + down * slant
        grid = torch.empty(random.samples, side, side, 2)
        torch.mul(right, 1 / aspect, out=grid.select(3, 0))
        grid.select(3, 1).copy_(down)
        plane = distance_atlas().index_select(0, glyph).view(-1, 1, ATLAS_SIDE, ATLAS_SIDE)
        sampled = F.grid_sample(plane, grid, padding_mode="border", align_corners=True)
        distance = sampled.squeeze(1).mul_(height)
        if presence is not None:
            distance.add_((1 - presence) * (4 * side))
        nearest = distance if nearest is None else torch.minimum(nearest, distance)
    assert nearest is not None
    return nearest, height * random.uniform(0.045, 0.1)


def _clutter(
    image: Tensor, ground: Tensor, contrast: Tensor, random: _Random, x: Tensor, y: Tensor
) -> None:
    """Paint background clutter: an edge between two colors, and two bars."""
    brightness = ground.mean(dim=1)
    for kind in ("edge", "bar", "bar"):
        angle = random.uniform(0, 6.2832)
        away = x * torch.cos(angle) + y * torch.sin(angle) - random.uniform(-13, 13)
        if kind == "bar":
            away = random.uniform(0.4, 1.6) - away.abs()
        shade = brightness + contrast * random.uniform(-0.7, 0.7)
        cover = (away + 0.5).clamp_(0, 1) * random.bernoulli(0.45)
        _paint(image, cover, random.color(shade.clamp(0, 1), 0.25))


def _light(image: Tensor, random: _Random, x: Tensor, y: Tensor) -> None:
    """Darken the image by a gradient and by random patches."""
    patches = torch.rand(random.samples, 1, 5, 5, generator=random.generator)
    side = x.numel()
    shade = F.interpolate(patches, size=(side, side), mode="bilinear", align_corners=True)
    shade = shade.squeeze(1) * random.uniform(0, 0.45)
    for ticks in (x, y):
        slope = random.uniform(-0.01, 0.01)
        shade += ticks * slope + (side / 2) * slope.abs()
    image.mul_((1 - shade).unsqueeze(1))


def _paint(image: Tensor, coverage: Tensor, color: Tensor) -> None:
    """Blend a color over the image with opacity `coverage` of shape (samples, rows, columns)."""
    image.add_((color - image).mul_(coverage.unsqueeze(1)))


def _blur(image: Tensor, weight: Tensor) -> None:
    """Average each pixel with its neighbors, along rows and then along columns."""
    for dimension in (3, 2):
        length = image.shape[dimension] - 2
        before = image.narrow(dimension, 0, length)
        after = image.narrow(dimension, 2, length)
        inner = image.narrow(dimension, 1, length)
        mixed = ((before + after).mul_(0.5) - inner).mul_(weight * 2)
        inner.add_(mixed)
