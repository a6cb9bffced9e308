"""Draws chunks of images of one digit each: as on a house among whatever surrounds it, or plain.

Images are a function of the generator alone, bit for bit and whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from paceline.data.glyphs import ATLAS_SIDE, FONTS, HALF_EXTENT, WIDTH, distance_atlas

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
