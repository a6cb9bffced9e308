"""Curves downsampled for charts without losing outliers.

A curve of any length becomes at most MAX_POINTS intervals of equal length, each with its median or
mean, minimum and maximum: a single slow iteration in a million still shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 300
"""More than a chart has room for."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """`x` is the end of each interval; up to MAX_POINTS values, each interval is one value."""

    x: Floats
    middle: Floats
    low: Floats
    high: Floats

    def __len__(self) -> int:
        return len(self.x)

    @property
    def is_exact(self) -> bool:
        return bool(np.array_equal(self.low, self.high))


def edges(count: int, buckets: int = MAX_POINTS) -> NDArray[np.int64]:
    """The starts of the intervals of `count` values, followed by `count`."""
    intervals = min(count, buckets)
    if intervals == 0:
        return np.zeros(0, dtype=np.int64)
    return np.linspace(0, count, intervals + 1).astype(np.int64)


def downsample(x: Floats, y: Floats, *, use_mean: bool = False, buckets: int = MAX_POINTS) -> Curve:
    """Intervals of `y` with their medians (or means); NaN and infinite values are skipped."""
    known = np.isfinite(y)
    if not known.all():
        x, y = x[known], y[known]
    bounds = edges(len(y), buckets)
    if len(bounds) == 0:
        empty = np.zeros(0)
        return Curve(empty, empty, empty, empty)
    if len(bounds) - 1 == len(y):
        return Curve(x, y, y, y)
    starts = bounds[:-1]
    low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    if use_mean:
        middle = np.add.reduceat(y, starts) / np.diff(bounds)
    else:
        pairs = zip(starts, bounds[1:], strict=True)
        middle = np.array([np.median(y[begin:end]) for begin, end in pairs])
    return Curve(x[bounds[1:] - 1], middle, low, high)


def merge_repeats(curves: Sequence[Curve]) -> tuple[Curve, int]:
    """The mean of repeats with their minimum and maximum, and the number of repeats in it.

    Only curves with the same points as the first are merged.
    """
    first = curves[0]
    same = [curve for curve in curves if np.array_equal(curve.x, first.x)]
    return (
        Curve(
            first.x,
            np.mean([curve.middle for curve in same], axis=0),
            np.min([curve.low for curve in same], axis=0),
            np.max([curve.high for curve in same], axis=0),
        ),
        len(same),
    )
