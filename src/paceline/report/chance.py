"""Whether chance could have made one cell more accurate than another."""

from __future__ import annotations

import math

from paceline.report.cells import Cell
from paceline.report.statistics import difference


def doubt(better: Cell, worse: Cell) -> str:
    """By the repeats, or by the size of the test set; empty where there is no doubt."""
    values = [better.finals("test_accuracy"), worse.finals("test_accuracy")]
    if min(map(len, values)) > 1:
        found = difference(*reversed(values))
        return "" if found.is_significant else ", within noise"
    samples = better.config.test_samples
    if not samples:
        return " (one repeat)"
    best, second = (math.fsum(each) / len(each) for each in values)
    chance = sum(accuracy * (1 - accuracy) / samples for accuracy in (best, second))
    within = best - second <= 1.96 * math.sqrt(max(0.0, chance))
    return f", within the noise of {samples:,} test samples" if within else " (one repeat)"
