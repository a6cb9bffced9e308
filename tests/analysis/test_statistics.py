"""Significance: few false positives whatever the number of groups, and real differences found."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.analysis.ranking import RankedGroup, Ranking
from paceline.analysis.run import Run, open_run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.statistics import (
    ALPHA,
    Difference,
    Sample,
    against_first,
    correct,
    difference,
    half_interval,
    repeats_needed,
    t_quantile,
)
from paceline.analysis.verdict import Verdict, make_verdict, rank
from paceline.report.wording.differences import interval_name
from paceline.report.wording.findings import findings
from paceline.report.wording.headline import headline
from tests.support.records import FakeRun, write_run

TRIALS = 1500


def limit(trials: int) -> float:
    """An upper bound of the measured rate, three standard deviations above a true rate of 5%."""
    return ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / trials)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(write_run(tmp_path, FakeRun("a")))


def claims(verdict: Verdict) -> bool:
    """Whether it says of any two groups that they differ."""
    subjects = {point.subject for point in findings(verdict)}
    return " is fastest: " in headline(verdict) or "First clear difference" in subjects


def draw(rng: random.Random, means: Sequence[float], repeats: int) -> list[list[float]]:
    """Step times with a deviation of 2%."""
    return [[rng.gauss(mean, 0.02) for _ in range(repeats)] for mean in means]


def ranked(run: Run, drawn: Sequence[Sequence[float]]) -> Verdict:
    ranked = [
        RankedGroup(RunGroup(f"{i}", [run]), list(values), []) for i, values in enumerate(drawn)
    ]
    verdict = Verdict(ranking=Ranking("per iteration", sorted(ranked, key=lambda one: one.mean)))
    rank(verdict)
    return verdict


@pytest.mark.parametrize("repeats", [2, 3, 5])
@pytest.mark.parametrize("groups", [2, 4, 8, 12])
def test_identical_cells_are_rarely_called_different(run: Run, groups: int, repeats: int) -> None:
    """The fastest is chosen after seeing the data; the rate of false claims includes that."""
    rng = random.Random(groups * 10 + repeats)
    false = sum(claims(ranked(run, draw(rng, [1.0] * groups, repeats))) for _ in range(TRIALS))
    assert false / TRIALS <= limit(TRIALS)


def test_a_whole_verdict_rarely_names_a_difference_of_identical_cells(run: Run) -> None:
    rng = random.Random(1)
    trials, false = 150, 0
    for _ in range(trials):
        groups = [RunGroup(f"{index}", [run]) for index in range(8)]
        for group, values in zip(groups, draw(rng, [1.0] * 8, 3), strict=True):
            vars(group)["iteration_means"] = values  # Where the group would cache it.
        false += claims(make_verdict(groups))
    assert false / trials <= limit(trials)


@pytest.mark.parametrize(("groups", "repeats", "lead"), [(2, 3, 0.15), (4, 3, 0.3), (8, 5, 0.15)])
def test_a_real_lead_is_found(run: Run, groups: int, repeats: int, lead: float) -> None:
    """One group is faster by a multiple of the spread of 2%; the others are equal."""
    rng = random.Random(2)
    found, trials = 0, 100
    for _ in range(trials):
        verdict = ranked(run, draw(rng, [1 - lead, *[1.0] * (groups - 1)], repeats))
        found += headline(verdict).startswith("0 is fastest: ")
    assert found >= 0.9 * trials


def test_cells_that_all_differ_leave_a_small_family_to_the_last_comparison() -> None:
    """Holm: once the easy pairs are decided, the hard one is tested at a larger level."""
    rng = random.Random(3)
    samples = [Sample(one) for one in draw(rng, [1.0, 1.2, 1.6, 2.4, 3.6, 5.0], 5)]
    lead = against_first([samples])[0][0]
    assert lead.is_significant
    assert lead.comparisons == 15
    assert lead.level > 2 * ALPHA / 15


def gap_of(p_value: float) -> Difference:
    """With so many degrees of freedom that t is nearly normal."""
    return Difference(1.0, t_quantile(math.inf, p_value), True, True, error=1.0, degrees=math.inf)


def test_holm_rejects_in_order_and_stops_at_the_first_that_is_not_significant() -> None:
    """By hand, with four tests: 0.05/4 = 0.0125, 0.05/3 = 0.0167, then 0.05/2 = 0.025 stops."""
    corrected = correct([gap_of(p) for p in (0.04, 0.012, 0.03, 0.015)])
    assert [gap.is_significant for gap in corrected] == [False, True, False, True]
    assert [gap.level for gap in corrected] == pytest.approx([0.025, 0.0125, 0.025, 0.05 / 3])
    for gap in corrected:
        assert (gap.low > 0) == gap.is_significant, "the interval agrees with the claim"


@pytest.mark.parametrize(
    ("degrees", "alpha", "value"),
    # From printed tables of Student's t.
    [
        (1, 0.05, 12.706), (2, 0.05, 4.303), (4, 0.05, 2.776), (30, 0.05, 2.042),
        (10, 0.01, 3.169), (4, 0.001, 8.610), (120, 0.05, 1.980), (math.inf, 0.05, 1.960),
    ],
)  # fmt: skip
def test_critical_values_are_those_of_the_tables(
    degrees: float, alpha: float, value: float
) -> None:
    assert t_quantile(degrees, alpha) == pytest.approx(value, abs=0.0006)


def test_an_interval_is_called_corrected_where_several_differences_are_tested() -> None:
    alone, *family = correct([gap_of(0.04)]) + correct([gap_of(0.04), gap_of(0.5)])
    assert interval_name(alone) == "95% CI"
    assert {interval_name(gap) for gap in family} == {"corrected interval"}
    assert family[1].level == ALPHA / 2


@pytest.mark.parametrize("repeats", [2, 3])
def test_equal_repeats_are_no_proof_of_a_small_difference(repeats: int) -> None:
    gap = difference([0.9] * repeats, [0.901] * repeats)
    assert not gap.is_significant
    assert gap.low < 0 < gap.high
    assert difference([0.9] * repeats, [1.1] * repeats).is_significant


def test_repeats_are_planned_from_no_smaller_a_spread_than_the_test_has() -> None:
    planned = repeats_needed([1.0, 1.0], [1.001, 1.001], 0.001)
    assert planned is not None
    # By hand: 2 (1.96 + 0.84)^2 = 15.7, and one or two more as t is wider.
    assert planned == pytest.approx(17, abs=1)


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_values_on_a_coarse_grid_are_rarely_called_different(repeats: int) -> None:
    """Two of two values: one time in eight, each sample is without spread and they differ."""
    rng = random.Random(repeats)
    false = 0
    for _ in range(TRIALS):
        drawn = [[rng.choice((1.0, 1.001)) for _ in range(repeats)] for _ in range(2)]
        false += difference(*drawn).is_significant
    assert false / TRIALS <= limit(TRIALS)


def test_a_single_run_is_never_significant() -> None:
    blocks = [1.0, 1.01, 1.02]
    gap = difference([1.0], [2.0], blocks, [one + 1 for one in blocks])
    assert gap.excludes_zero
    assert not gap.is_significant


@pytest.mark.parametrize("comparisons", [1, 28])
def test_the_number_of_repeats_detects_the_difference_four_times_in_five(comparisons: int) -> None:
    """Planned from a known spread: the two samples have a variance of exactly 0.02."""
    planned = repeats_needed([0.9, 1.1], [0.9, 1.1], 0.1, comparisons)
    assert planned is not None
    rng = random.Random(4)
    found, trials = 0, 400
    for _ in range(trials):
        one, other = (
            [rng.gauss(mean, math.sqrt(0.02)) for _ in range(planned)] for mean in (1.0, 1.1)
        )
        found += correct([difference(one, other)], comparisons)[0].is_significant
    assert found / trials == pytest.approx(0.8, abs=0.07)


def test_no_sensible_number_of_repeats_is_none() -> None:
    assert repeats_needed([0.5, 1.5], [0.5, 1.5], 0.001) is None
    assert repeats_needed([1.0], [1.1, 1.2], 0.1) is None


def test_the_interval_of_a_mean_is_that_of_students_t() -> None:
    # 4.303 is the critical value with two degrees of freedom, 1 the standard deviation.
    assert half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert half_interval([2.0]) is None
