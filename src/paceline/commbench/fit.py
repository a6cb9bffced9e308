"""Latency and bandwidth from times at several sizes: t = a + b n, by weighted least squares."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_RELATIVE_ERROR = 0.02
"""Of a time, however little its repeats differ: no network is a straight line to the last digit."""


FEWEST_FOR_ERRORS = 3
"""Sizes: through two of them a line always goes, so nothing tells how far it can be trusted."""


@dataclass(frozen=True, slots=True)
class Point:
    size_bytes: float
    seconds: Sequence[float]
    """Of the repeats."""

    @property
    def middle(self) -> float:
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        """The standard error of the middle, by the spread of the repeats."""
        spread = statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0
        # That of a median is about 1.25 times that of a mean.
        measured = 1.25 * spread / math.sqrt(len(self.seconds))
        return max(measured, LEAST_RELATIVE_ERROR * self.middle)


@dataclass(frozen=True, slots=True)
class Line:
    latency_seconds: float
    latency_error_seconds: float | None
    bytes_per_second: float
    bytes_per_second_error: float | None


def fit(points: Sequence[Point]) -> Line | None:
    """None where the times say nothing of both, as from one size, or from times that fall, or that
    rise by no more than the error of their rise.

    The errors are one standard deviation, None with fewer than FEWEST_FOR_ERRORS sizes. Where the
    times are further from the line than their own errors explain, the errors are widened by as
    much. A latency below nothing counts as none.
    """
    sizes = len({point.size_bytes for point in points})
    if sizes < 2:
        return None
    a, b, a_variance, b_variance = _solve(points)
    if a < 0:
        a, b, a_variance, b_variance = _through_zero(points)
    if b <= 0:
        return None
    misfit = sum(((p.middle - a - b * p.size_bytes) / p.error) ** 2 for p in points)
    widening = math.sqrt(max(1.0, misfit / max(1, len(points) - 2)))
    if sizes < FEWEST_FOR_ERRORS:
        return Line(a, None, 1 / b, None)
    a_error, b_error = (math.sqrt(each) * widening for each in (a_variance, b_variance))
    if b_error >= b:
        return None
    return Line(a, a_error, 1 / b, b_error / b**2)


def _solve(points: Sequence[Point]) -> tuple[float, float, float, float]:
    """a, b and their variances."""
    weights = [1 / point.error**2 for point in points]
    total = sum(weights)
    x = sum(w * p.size_bytes for w, p in zip(weights, points, strict=True)) / total
    y = sum(w * p.middle for w, p in zip(weights, points, strict=True)) / total
    squares = sum(w * (p.size_bytes - x) ** 2 for w, p in zip(weights, points, strict=True))
    products = sum(
        w * (p.size_bytes - x) * (p.middle - y) for w, p in zip(weights, points, strict=True)
    )
    b = products / squares
    return y - b * x, b, 1 / total + x**2 / squares, 1 / squares


def _through_zero(points: Sequence[Point]) -> tuple[float, float, float, float]:
    weights = [1 / point.error**2 for point in points]
    squares = sum(w * p.size_bytes**2 for w, p in zip(weights, points, strict=True))
    products = sum(w * p.size_bytes * p.middle for w, p in zip(weights, points, strict=True))
    return 0.0, products / squares, _solve(points)[2], 1 / squares
