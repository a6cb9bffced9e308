"""Means with their uncertainty, and whether two of them differ.

Repeats of a run are independent: their means give the interval. With a single run its iterations
have to do. They follow one another and are not independent, so the run is cut into BLOCKS long
stretches whose means nearly are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.report.buckets import Floats

BLOCKS = 20
FEWEST_IN_A_BLOCK = 2
FEWEST_ITERATIONS = 20
"""Fewer say too little of how a run's pace varies."""

# 97.5 % points of Student's t for 1 to 30 degrees of freedom, and for 40, 60, 120 and infinitely
# many; between them it is nearly linear in the reciprocal of the degrees.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_RECIPROCALS = [0.0, 1 / 120, 1 / 60, 1 / 40, *(1 / degrees for degrees in range(30, 0, -1))]
_POINTS = [1.960, 1.980, 2.000, 2.021, *reversed(_T)]


@dataclass(frozen=True, slots=True)
class Difference:
    """How much longer the second takes than the first, or how much more it has."""

    amount: float
    """In the unit of the values."""
    share: float
    """Of the second; so are the ends of the interval."""
    low: float
    high: float
    over_repeats: bool
    """Whether the interval is over repeats; otherwise over stretches of one run each."""
    known: bool
    """Whether there is an interval at all."""

    @property
    def is_significant(self) -> bool:
        return self.known and (self.low > 0 or self.high < 0)


def student(degrees: float) -> float:
    """The 97.5 % point of Student's t."""
    return float(np.interp(1 / max(degrees, 1.0), _RECIPROCALS, _POINTS))


def block_means(values: Floats) -> list[float]:
    """Means of stretches of equal length; none where there are too few values."""
    if len(values) < FEWEST_ITERATIONS - 1:  # The first iteration stands apart.
        return []
    blocks = min(BLOCKS, len(values) // FEWEST_IN_A_BLOCK)
    # What does not fill a stretch is left out at the beginning, where a run is still warming up.
    length = len(values) // blocks
    return [float(mean) for mean in values[-blocks * length :].reshape(blocks, length).mean(axis=1)]


def difference(
    first: Sequence[float],
    second: Sequence[float],
    first_blocks: Sequence[float] = (),
    second_blocks: Sequence[float] = (),
) -> Difference:
    """Of two means over repeats, by Welch's test; with one repeat, over the blocks of the runs."""
    means = math.fsum(first) / len(first), math.fsum(second) / len(second)
    amount = means[1] - means[0]
    over_repeats = min(len(first), len(second)) > 1
    samples = (first, second) if over_repeats else (first_blocks, second_blocks)
    if min(map(len, samples)) < 2 or means[1] == 0:
        share = amount / means[1] if means[1] else 0.0
        return Difference(amount, share, share, share, over_repeats=False, known=False)
    variances = [_variance(values) / len(values) for values in samples]
    half = _welch(variances, [len(values) for values in samples]) * math.sqrt(sum(variances))
    return Difference(
        amount,
        amount / means[1],
        (amount - half) / means[1],
        (amount + half) / means[1],
        over_repeats=over_repeats,
        known=True,
    )


def excess(
    first: Sequence[float],
    second: Sequence[float],
    first_blocks: Sequence[float] = (),
    second_blocks: Sequence[float] = (),
) -> Difference:
    """How much more the first has than the second, as a share of the second; else as above."""
    gap = difference(first, second, first_blocks, second_blocks)
    return replace(gap, amount=-gap.amount, share=-gap.share, low=-gap.high, high=-gap.low)


def repeats_to_tell(first: Sequence[float], second: Sequence[float]) -> int | None:
    """Repeats of each that would tell such a difference four times in five; None if hopeless."""
    gap = abs(math.fsum(first) / len(first) - math.fsum(second) / len(second))
    if min(len(first), len(second)) < 2 or gap == 0:
        return None
    # The usual sample size of a two-sided 5 % test with power 0.8: (1.960 + 0.842) ** 2.
    needed = math.ceil(7.85 * (_variance(first) + _variance(second)) / gap**2) + 1
    return needed if needed <= 100 else None


def _welch(variances: Sequence[float], counts: Sequence[int]) -> float:
    total = sum(variances)
    if total == 0:
        return 0.0
    parts = zip(variances, counts, strict=True)
    return student(total**2 / sum(part**2 / (count - 1) for part, count in parts))


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
