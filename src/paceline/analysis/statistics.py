"""Means with their uncertainty, and whether two of them differ.

Repeats of a run are independent: their means give the interval. A single run has only its
iterations, which are not independent, so the run is cut into BLOCKS long blocks whose means nearly
are.

Two or three equal values do not show that a figure never varies, so no variance is taken to be
smaller than a floor: LEAST_DEVIATION of the mean, and for accuracies that of the test set.

Where several differences are tested together, `correct` applies Holm's method, so that the chance
of calling any of them significant by accident stays at 5%. The fastest of several groups is chosen
after seeing the data, so its lead counts as one of all pairwise comparisons (`against_first`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from paceline.analysis.curves import Floats

BLOCKS = 20
FEWEST_IN_A_BLOCK = 2
FEWEST_ITERATIONS = 20
"""Fewer show too little of the variation of the step time."""
ALPHA = 0.05
"""The accepted chance of any false positive among differences that are tested together."""
POWER = 0.8
"""The chance of detecting a real difference that a number of repeats is planned for."""
MOST_PLANNED = 10_000
"""The largest number of repeats that is worth computing."""
LEAST_DEVIATION = 0.001
"""Of the mean: repeats vary by at least this much, even where a few of them happen to be equal. It
is also coarser than the clock for every step that takes longer than a microsecond."""
MOST_PAIRED = 48
"""With more groups than this, Holm steps over the comparisons with the fastest only: the number of
all pairs grows with the square."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How much longer the second takes than the first, or how much more it has."""

    amount: float
    """In the unit of the values."""
    share: float
    """Of the second; so are the ends of the interval."""
    across_runs: bool
    """Whether the interval is over repeats; otherwise over blocks of one run each."""
    has_interval: bool
    """Whether there is an interval at all."""
    error: float = 0.0
    """Standard error of `share`."""
    degrees: float = 1.0
    """Degrees of freedom of `error`, by Welch and Satterthwaite."""
    level: float = ALPHA
    """The p-value below which it is significant: smaller where several are tested together."""
    comparisons: int = 1
    """How many differences `level` is corrected for."""

    @property
    def low(self) -> float:
        return self.share - self._half

    @property
    def high(self) -> float:
        return self.share + self._half

    @property
    def is_corrected(self) -> bool:
        """Whether the interval is wider than a 95% CI, by its own step of Holm's method."""
        return self.comparisons > 1

    @property
    def _half(self) -> float:
        return t_quantile(self.degrees, self.level) * self.error if self.error else 0.0

    @property
    def p_value(self) -> float:
        """Two-sided, before any correction; 1 where nothing is known."""
        if not self.has_interval:
            return 1.0
        if self.error == 0:
            return 0.0 if self.share else 1.0
        return two_sided_p(abs(self.share) / self.error, self.degrees)

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval does."""
        return self.has_interval and self.p_value < self.level

    @property
    def is_tie(self) -> bool:
        return self.has_interval and not self.excludes_zero

    @property
    def is_significant(self) -> bool:
        """Never with a single run: its iterations do not show the spread between runs."""
        return self.across_runs and self.excludes_zero


@dataclass(frozen=True, slots=True)
class Sample:
    """The values of a figure of one group."""

    values: Sequence[float]
    """One per repeat."""
    blocks: Sequence[float] = ()
    """Means of blocks of the first run."""


def two_sided_p(statistic: float, degrees: float) -> float:
    """The chance that Student's t is at least as far from zero."""
    if math.isinf(degrees):
        return math.erfc(statistic / math.sqrt(2))
    return _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + statistic**2))


def binomial_p(successes: int, trials: int, chance: float) -> float:
    """The probability of at least this many successes, each with probability `chance`."""
    return 1.0 if successes <= 0 else _incomplete_beta(successes, trials - successes + 1, chance)


@lru_cache(maxsize=4096)
def t_quantile(degrees: float, alpha: float = ALPHA) -> float:
    """The two-sided critical value of Student's t: it is further from zero with chance alpha."""
    low, high = 0.0, 1.0
    while two_sided_p(high, degrees) > alpha and high < 1e12:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, degrees) > alpha else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (modified Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    result = d
    for step in range(1, 300):
        even = step * (b - step) * x / ((a + 2 * step - 1) * (a + 2 * step))
        odd = -(a + step) * (a + b + step) * x / ((a + 2 * step) * (a + 2 * step + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d)
            c = 1 + term / c
            result *= c * d
        if abs(c * d - 1) < 1e-13:
            break
    return front * result


def half_interval(values: Sequence[float]) -> float | None:
    """Half the 95% confidence interval of the mean over repeats; None with fewer than two."""
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1) * math.sqrt(_floored_variance(values) / len(values))


def correct(
    gaps: Sequence[Difference], comparisons: int | None = None, shown: int | None = None
) -> list[Difference]:
    """The first `shown` differences, else all, with intervals by Holm's method; in the same order.

    Each interval has the level at which Holm tests that difference, so it excludes zero exactly
    where the difference is significant after the correction. `comparisons` is the size of the
    family where it has more members than `gaps`.
    """
    p_values = {index: gap.p_value for index, gap in enumerate(gaps) if gap.has_interval}
    left = family = comparisons or len(p_values)
    is_rejecting = True
    levels = {}
    for index in sorted(p_values, key=lambda index: p_values[index]):
        levels[index] = ALPHA / left
        is_rejecting = is_rejecting and p_values[index] < levels[index]
        left -= is_rejecting
    return [
        replace(gap, level=levels[index], comparisons=family) if index in levels else gap
        for index, gap in enumerate(gaps[:shown])
    ]


def against_first(groups: Sequence[Sequence[Sample]]) -> list[list[Difference]]:
    """In each group, every later sample against the first, which was chosen for its mean.

    Any sample of a group could have come first, so the family is every pair within the groups.
    """
    gaps = [_between(group[0], other) for group in groups for other in group[1:]]
    shown = len(gaps)
    for group in groups:
        if len(group) <= MOST_PAIRED:
            gaps += [_between(*pair) for pair in itertools.combinations(group[1:], 2)]
    # A pair without an interval is not tested, and one that is left out counts as not rejected.
    untested = sum(not gap.has_interval for gap in gaps)
    family = sum(len(group) * (len(group) - 1) // 2 for group in groups) - untested
    corrected = iter(correct(gaps, max(1, family), shown))
    return [list(itertools.islice(corrected, max(0, len(group) - 1))) for group in groups]


def _between(first: Sample, second: Sample) -> Difference:
    return difference(first.values, second.values, first.blocks, second.blocks)


def block_means(values: Floats) -> list[float]:
    """Means of blocks of equal length; empty if there are too few values."""
    if len(values) < FEWEST_ITERATIONS - 1:  # Without the first iteration.
        return []
    blocks = min(BLOCKS, len(values) // FEWEST_IN_A_BLOCK)
    # The remainder is dropped from the beginning, where a run is still warming up.
    length = len(values) // blocks
    return [float(mean) for mean in values[-blocks * length :].reshape(blocks, length).mean(axis=1)]


def difference(
    first: Sequence[float],
    second: Sequence[float],
    first_blocks: Sequence[float] = (),
    second_blocks: Sequence[float] = (),
    *,
    floors: tuple[float, float] = (0.0, 0.0),
) -> Difference:
    """Of two means over repeats, by Welch's test; with one repeat, over the blocks of the runs.

    `floors` are variances of the two means that more repeats do not reduce, such as those of the
    test set that all repeats share.
    """
    means = math.fsum(first) / len(first), math.fsum(second) / len(second)
    amount = means[1] - means[0]
    across_runs = min(len(first), len(second)) > 1
    samples = (first, second) if across_runs else (first_blocks, second_blocks)
    share = amount / means[1] if means[1] else 0.0
    if min(map(len, samples)) < 2 or means[1] == 0:
        return Difference(amount, share, across_runs=False, has_interval=False)
    variances = [
        max(_floored_variance(values) / len(values), floor)
        for values, floor in zip(samples, floors, strict=True)
    ]
    return Difference(
        amount,
        share,
        across_runs=across_runs,
        has_interval=True,
        error=math.sqrt(sum(variances)) / abs(means[1]),
        degrees=_degrees(variances, [len(values) for values in samples]),
    )


def relative_increase(
    first: Sequence[float],
    second: Sequence[float],
    first_blocks: Sequence[float] = (),
    second_blocks: Sequence[float] = (),
    *,
    floors: tuple[float, float] = (0.0, 0.0),
) -> Difference:
    """How much more the first has than the second, as a share of the second; else as above."""
    gap = difference(first, second, first_blocks, second_blocks, floors=floors)
    return replace(gap, amount=-gap.amount, share=-gap.share)


def repeats_needed(
    first: Sequence[float], second: Sequence[float], gap: float, comparisons: int = 1
) -> int | None:
    """Repeats of each that detect a difference of `gap` with a chance of 80%, given their spread.

    None where the spread is unknown, or no sensible number is enough.
    """
    if min(len(first), len(second)) < 2 or gap <= 0:
        return None
    variance = _floored_variance(first) + _floored_variance(second)
    alpha = ALPHA / comparisons

    def is_enough(count: int) -> bool:
        # With such small numbers both percentiles are of Student's t and not of the normal curve.
        degrees = 2.0 * (count - 1)
        reach = t_quantile(degrees, alpha) + t_quantile(degrees, 2 * (1 - POWER))
        return reach**2 * variance / gap**2 <= count

    low, high = 1, 2
    while not is_enough(high):
        low, high = high, 2 * high
        if high > MOST_PLANNED:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _degrees(variances: Sequence[float], counts: Sequence[int]) -> float:
    total = sum(variances)
    if total == 0:
        return float(sum(counts) - len(counts))
    parts = zip(variances, counts, strict=True)
    return max(1.0, total**2 / sum(part**2 / (count - 1) for part, count in parts))


def _floored_variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return max(_variance(values), (LEAST_DEVIATION * mean) ** 2)


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
