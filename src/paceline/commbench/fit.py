"""Fit latency and bandwidth: weighted least squares of t = a + b n over several sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_RELATIVE_ERROR = 0.02
"""Lower bound of a time's relative error: no network is exactly linear in the size."""
MIN_SIZES_FOR_ERRORS = 3
"""Two sizes always fit a line exactly, which leaves nothing to estimate errors from."""


@dataclass(frozen=True, slots=True)
class Point:
    size_bytes: float
    seconds: Sequence[float]
    """One for each repeat."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        """Standard error of the median, estimated from the spread of the repeats."""
        spread = statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0
        # The standard error of a median is about 1.25 times that of a mean.
        measured = 1.25 * spread / math.sqrt(len(self.seconds))
        return max(measured, MIN_RELATIVE_ERROR * self.median)


@dataclass(frozen=True, slots=True)
class Line:
    latency_seconds: float
    latency_error_seconds: float | None
    bytes_per_second: float
    bytes_per_second_error: float | None


def fit(points: Sequence[Point]) -> Line | None:
    """Fit a line to the median times.

    Returns None with a single size, and where the slope is negative or below its own error. Errors
    are one standard deviation, None with fewer than MIN_SIZES_FOR_ERRORS sizes; they are scaled up
    where the residuals exceed what the errors of the times explain. A negative latency becomes 0.
    """
    sizes = len({point.size_bytes for point in points})
    if sizes < 2:
        return None
    a, b, a_variance, b_variance = _solve(points)
    if a < 0:
        a, b, a_variance, b_variance = _through_zero(points)
    if b <= 0:
        return None
    chi_squared = sum(((p.median - a - b * p.size_bytes) / p.error) ** 2 for p in points)
    scale = math.sqrt(max(1.0, chi_squared / max(1, len(points) - 2)))
    if sizes < MIN_SIZES_FOR_ERRORS:
        return Line(a, None, 1 / b, None)
    a_error, b_error = (math.sqrt(variance) * scale for variance in (a_variance, b_variance))
    if b_error >= b:
        return None
    return Line(a, a_error, 1 / b, b_error / b**2)


def _solve(points: Sequence[Point]) -> tuple[float, float, float, float]:
    """Return a, b and their variances."""
    weights = [1 / point.error**2 for point in points]
    total = sum(weights)
    x = sum(w * p.size_bytes for w, p in zip(weights, points, strict=True)) / total
    y = sum(w * p.median for w, p in zip(weights, points, strict=True)) / total
    squares = sum(w * (p.size_bytes - x) ** 2 for w, p in zip(weights, points, strict=True))
    products = sum(
        w * (p.size_bytes - x) * (p.median - y) for w, p in zip(weights, points, strict=True)
    )
    b = products / squares
    return y - b * x, b, 1 / total + x**2 / squares, 1 / squares


def _through_zero(points: Sequence[Point]) -> tuple[float, float, float, float]:
    weights = [1 / point.error**2 for point in points]
    squares = sum(w * p.size_bytes**2 for w, p in zip(weights, points, strict=True))
    products = sum(w * p.size_bytes * p.median for w, p in zip(weights, points, strict=True))
    return 0.0, products / squares, _solve(points)[2], 1 / squares
