"""Whether chance could have made one cell more accurate than another."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.report.cells import RunGroup
from paceline.report.statistics import ALPHA, correct, difference, t_quantile


@dataclass(frozen=True, slots=True)
class AccuracyDifference:
    is_chance: bool
    """Whether noise alone could have made the difference."""
    words: str
    """What to add to a sentence about it, after a comma; may be empty."""

    def __str__(self) -> str:
        return f", {self.words}" if self.words else ""


def compare_accuracy(one: RunGroup, other: RunGroup, *, comparisons: int = 1) -> AccuracyDifference:
    """By the repeats, or else by the size of the test set.

    `comparisons` is the number of pairs that these two were selected from.
    """
    values = [cell.finals("test_accuracy") for cell in (one, other)]
    if min(map(len, values)) > 1:
        (gap,) = correct([difference(*values)], comparisons)
        is_chance = not gap.is_significant
        return AccuracyDifference(is_chance, "within noise" if is_chance else "")
    means = [math.fsum(each) / len(each) for each in values]
    if means[0] == means[1]:
        return AccuracyDifference(is_chance=True, words="the same")
    samples = one.config.test_samples
    if samples:
        variance = sum(max(0.0, mean * (1 - mean)) / samples for mean in means)
        if abs(means[0] - means[1]) <= t_quantile(math.inf, ALPHA / comparisons) * math.sqrt(
            variance
        ):
            return AccuracyDifference(
                is_chance=True, words=f"within the noise of {samples:,} test samples"
            )
    return AccuracyDifference(is_chance=False, words="in one repeat")
