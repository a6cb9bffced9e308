"""Whether chance could have made one cell more accurate than another."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.analysis.run_group import RunGroup
from paceline.analysis.statistics import (
    ALPHA,
    Difference,
    correct,
    difference,
    relative_increase,
    t_quantile,
)
from paceline.config import RunConfig
from paceline.data.manifest import OFFICIAL_SETS

DRAWN_SETS = ("digits", "plain_digits")
DRAWN_TEST_SAMPLES = 10_000
"""Of the datasets that are drawn, unless the configuration says otherwise."""


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
        (gap,) = correct([difference(*values, floors=_floors(one, other))], comparisons)
        is_chance = not gap.is_significant
        return AccuracyDifference(is_chance, "within noise" if is_chance else "")
    means = [math.fsum(each) / len(each) for each in values]
    if means[0] == means[1]:
        return AccuracyDifference(is_chance=True, words="the same")
    samples = size_of_test_set(one.config)
    if samples:
        deviation = math.sqrt(sum(_floors(one, other)))
        if abs(means[0] - means[1]) <= t_quantile(math.inf, ALPHA / comparisons) * deviation:
            return AccuracyDifference(
                is_chance=True, words=f"within the noise of {samples:,} test samples"
            )
    return AccuracyDifference(is_chance=False, words="in a single run")


def accuracy_increase(first: RunGroup, other: RunGroup) -> Difference | None:
    """How much more accurate the first is, as a share of the other; None where one has no value."""
    own, others = (cell.finals("test_accuracy") for cell in (first, other))
    if not own or not sum(others):
        return None
    return relative_increase(own, others, floors=_floors(first, other))


def size_of_test_set(config: RunConfig) -> int | None:
    """The size of the test set; None for a user's own dataset, which may have any."""
    if config.test_samples is not None:
        return config.test_samples
    if config.data in OFFICIAL_SETS:
        return OFFICIAL_SETS[config.data].test_samples
    return DRAWN_TEST_SAMPLES if config.data in DRAWN_SETS else None


def _floors(first: RunGroup, other: RunGroup) -> tuple[float, float]:
    """Variances of the two mean accuracies, each as a count over a finite test set.

    All repeats share the test set, so the variance does not shrink with their number.
    """
    return _binomial_variance(first), _binomial_variance(other)


def _binomial_variance(cell: RunGroup) -> float:
    values = cell.finals("test_accuracy")
    samples = size_of_test_set(cell.config) or DRAWN_TEST_SAMPLES
    # One success and one failure more, since not even a perfect score has no uncertainty.
    share = (math.fsum(values) / len(values) * samples + 1) / (samples + 2)
    return max(0.0, share * (1 - share)) / samples
