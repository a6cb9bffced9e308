"""A sample as text: the median with its spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable


def quartiles(values: Iterable[float], digits: int = 2) -> str:
    """Median and quartiles, rounded to `digits` decimals."""
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def min_max(values: Iterable[float], spec: str = ".2f") -> str:
    """Median, minimum and maximum, each in the format `spec`."""
    ordered = sorted(values)
    median = statistics.median(ordered)
    return f"{median:{spec}} ({ordered[0]:{spec}}-{ordered[-1]:{spec}})"


def median_interval(values: Iterable[float], digits: int = 2) -> str:
    """Median and its 95% confidence interval, which assumes no distribution (order statistics)."""
    ordered = sorted(values)
    n, below, rank = len(ordered), 0.0, 0
    while (below := below + math.comb(n, rank) / 2**n) < 0.025:
        rank += 1
    low, high = ordered[max(0, rank - 1)], ordered[min(n - 1, n - rank)]
    return f"{statistics.median(ordered):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
