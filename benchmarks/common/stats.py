"""A sample as text: the median with its spread."""

from __future__ import annotations

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
