"""Accuracy, convergence and time to the target, and whether a difference is noise.

Tasks without an accuracy, such as a regression, are judged by their test loss instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup, known
from paceline.analysis.statistics import (
    ALPHA,
    Difference,
    binomial_p,
    correct,
    difference,
    relative_increase,
    t_quantile,
)
from paceline.analysis.validation import is_number
from paceline.config import RunSettings, Target
from paceline.data.manifest import OFFICIAL_SETS

DRAWN_SETS = ("digits", "plain_digits")
DRAWN_TEST_SAMPLES = 10_000
"""Default of the generated datasets."""
DRAWN_CLASSES = 10


@dataclass(frozen=True, slots=True)
class Quality:
    """The final figure that says how well a run has learned."""

    key: str
    name: str
    is_higher_better: bool

    def best(self, values: Iterable[float]) -> float | None:
        return (max if self.is_higher_better else min)(values, default=None)

    def lead(self, better: float, worse: float) -> float:
        """How much better the first is; negative if it is worse."""
        return better - worse if self.is_higher_better else worse - better


ACCURACY = Quality("test_accuracy", "test accuracy", is_higher_better=True)
LOSS = Quality("test_loss", "test loss", is_higher_better=False)


def quality_of(groups: Iterable[RunGroup]) -> Quality:
    """The accuracy; the test loss where no configuration has an accuracy."""
    return ACCURACY if any(group.finals(ACCURACY.key) for group in groups) else LOSS


@dataclass(frozen=True, slots=True)
class AccuracyDifference:
    """A difference in accuracy or test loss."""

    is_chance: bool
    """Whether noise alone explains the difference."""
    is_single: bool = False
    """Whether one of the two has a single run, so that the spread between runs is unknown."""
    is_equal: bool = False
    """Whether two single runs have the same value."""
    test_samples: int | None = None
    """The size of the test set, where its sampling noise explains a difference of single runs."""


def compare_accuracy(
    one: RunGroup, other: RunGroup, *, quality: Quality = ACCURACY, comparisons: int = 1
) -> AccuracyDifference:
    """Test a difference over the repeats; accuracies of single runs, by the size of the test set.

    `comparisons` is the number of pairs that these two were selected from.
    """
    values = [group.finals(quality.key) for group in (one, other)]
    # The noise of the test set is known for accuracies only, which are counts.
    floors = _floors(one, other) if quality is ACCURACY else (0.0, 0.0)
    if min(map(len, values)) > 1:
        (gap,) = correct([difference(*values, floors=floors)], comparisons)
        return AccuracyDifference(is_chance=not gap.is_significant)
    means = [math.fsum(each) / len(each) for each in values]
    if means[0] == means[1]:
        return AccuracyDifference(is_chance=True, is_single=True, is_equal=True)
    samples = size_of_test_set(one.settings) if quality is ACCURACY else None
    if samples:
        deviation = math.sqrt(sum(floors))
        if abs(means[0] - means[1]) <= t_quantile(math.inf, ALPHA / comparisons) * deviation:
            return AccuracyDifference(is_chance=True, is_single=True, test_samples=samples)
    return AccuracyDifference(is_chance=False, is_single=True)


def accuracy_increase(first: RunGroup, other: RunGroup) -> Difference | None:
    """How much more accurate the first is, as a share of the other; None if one has no value."""
    own, others = (group.finals("test_accuracy") for group in (first, other))
    if not own or not sum(others):
        return None
    return relative_increase(own, others, floors=_floors(first, other))


def size_of_test_set(settings: RunSettings) -> int | None:
    """The size of the test set; None for a user's own dataset, which may have any."""
    if settings.config is not None and settings.config.test_samples is not None:
        return settings.config.test_samples
    if settings.data in OFFICIAL_SETS:
        return OFFICIAL_SETS[settings.data].test_samples
    return DRAWN_TEST_SAMPLES if settings.data in DRAWN_SETS else None


@dataclass(frozen=True, slots=True)
class ChanceAccuracy:
    """An accuracy that guessing explains."""

    label: str
    accuracy: float
    chance: float
    """The accuracy of the best constant guess."""
    test_samples: int


def find_chance_accuracy(groups: Sequence[RunGroup]) -> list[ChanceAccuracy]:
    """Configurations whose accuracy is not above that of guessing, by a binomial test.

    Each is tested at 5% over the number of configurations, with the size of the test set as the
    number of trials, since repeats share the test set. Guessing is to name the most frequent class.
    Data with unknown frequencies are not tested.
    """
    tested = [
        ChanceAccuracy(group.label, accuracy, chance, samples)
        for group in groups
        if (accuracy := group.mean_of("test_accuracy")) is not None
        and (chance := _chance(group.settings)) is not None
        and (samples := size_of_test_set(group.settings)) is not None
    ]
    return [
        one
        for one in tested
        if binomial_p(round(one.accuracy * one.test_samples), one.test_samples, one.chance)
        > ALPHA / len(tested)
    ]


def _chance(settings: RunSettings) -> float | None:
    if settings.data in OFFICIAL_SETS:
        return OFFICIAL_SETS[settings.data].largest_class
    return 1 / DRAWN_CLASSES if settings.data in DRAWN_SETS else None


@dataclass(frozen=True, slots=True)
class TrainingLengths:
    """The shortest and the longest of configurations that were trained differently long."""

    shortest: RunGroup
    fewest_samples: int
    longest: RunGroup
    most_samples: int


MOST_LENGTH_DIFFERENCE = 0.02
"""Last batches of an epoch differ by less than this share."""


def compare_training_lengths(groups: Sequence[RunGroup]) -> TrainingLengths | None:
    """None if all were trained on about equally many samples, or until a target."""
    known_lengths = [
        (int(result["samples"]), group)
        for group in groups
        if group.finals("test_loss")
        and group.settings.target is None
        and (result := group.finished[0].result) is not None
        and result["samples"]
    ]
    if len(known_lengths) < 2:
        return None
    (fewest, shortest), (most, longest) = (
        choose(known_lengths, key=lambda one: one[0]) for choose in (min, max)
    )
    if most - fewest <= MOST_LENGTH_DIFFERENCE * most:
        return None
    return TrainingLengths(shortest, fewest, longest, most)


def _floors(first: RunGroup, other: RunGroup) -> tuple[float, float]:
    """Variances of the two mean accuracies, each as a count over a finite test set.

    All repeats share the test set, so the variance does not shrink with their number.
    """
    return _binomial_variance(first), _binomial_variance(other)


def _binomial_variance(group: RunGroup) -> float:
    values = group.finals("test_accuracy")
    samples = size_of_test_set(group.settings) or DRAWN_TEST_SAMPLES
    # One success and one failure more, since not even a perfect score has no uncertainty.
    share = (math.fsum(values) / len(values) * samples + 1) / (samples + 2)
    return max(0.0, share * (1 - share)) / samples


CONVERGENCE_TOLERANCE = 0.02
"""A test loss has converged when it stays this close to its final value, as a share of it ..."""
CONVERGENCE_SHARE = 0.2
"""... for at least this share of the epochs, since the last values are always close."""
MIN_EVALUATIONS = 6
"""With fewer, convergence is unknown."""


@dataclass(frozen=True, slots=True)
class AccuracySummary:
    """Values of each finished run of a group."""

    group: RunGroup
    quality: Quality
    finals: list[float]
    """Accuracy or test loss at the end."""
    losses: list[float]
    bests: list[float]
    """The best value of any evaluation."""
    convergence_epochs: list[float]
    """Of the runs that converged."""

    @property
    def best(self) -> float | None:
        return self.quality.best(self.bests)

    @property
    def final(self) -> float:
        return math.fsum(self.finals) / len(self.finals)

    @property
    def can_converge(self) -> bool:
        """Whether every run has enough evaluations to detect convergence."""
        return all(
            len(_evaluations(run, "test_loss")) >= MIN_EVALUATIONS for run in self.group.finished
        )


def summarize_accuracy(groups: Sequence[RunGroup]) -> list[AccuracySummary]:
    """Groups with a final accuracy, or with a test loss if none has an accuracy; the best first."""
    quality = quality_of(groups)
    found = [
        AccuracySummary(
            group,
            quality,
            finals,
            group.finals("test_loss"),
            group.values(partial(_best, quality)),
            group.values(convergence_epoch),
        )
        for group in groups
        if (finals := group.finals(quality.key))
    ]
    return sorted(found, key=lambda one: one.final, reverse=quality.is_higher_better)


def _evaluations(run: Run, key: str) -> list[tuple[float, float]]:
    """Epoch and value of each evaluation."""
    return [(entry["epoch"], entry[key]) for entry in run.history if is_number(entry.get(key))]


def _best(quality: Quality, run: Run) -> float | None:
    values = [value for _, value in _evaluations(run, quality.key)]
    return quality.best([*values, *known([run.final(quality.key)])])


def convergence_epoch(run: Run) -> float | None:
    """The epoch from which the test loss stays near its final value.

    None if it has not converged, or with too few evaluations.
    """
    losses = _evaluations(run, "test_loss")
    if len(losses) < MIN_EVALUATIONS:
        return None
    last_epoch, final = losses[-1]
    converged = last_epoch
    for epoch, loss in reversed(losses):
        if abs(loss - final) > CONVERGENCE_TOLERANCE * abs(final):
            break
        converged = epoch
    return converged if last_epoch - converged >= CONVERGENCE_SHARE * last_epoch else None


def common_accuracy(summaries: Sequence[AccuracySummary]) -> float:
    """The accuracy that every finished run reached at some time, rounded down."""
    return math.floor(100 * min(best for one in summaries for best in one.bests)) / 100


def epochs_to_accuracy(group: RunGroup, accuracy: float) -> list[float]:
    """Epochs to the first evaluation with this accuracy, of each finished run that has one."""
    return group.values(
        lambda run: next(
            (epoch for epoch, value in _evaluations(run, "test_accuracy") if value >= accuracy),
            None,
        )
    )


def have_same_dataset(summaries: Sequence[AccuracySummary]) -> bool:
    return len({one.group.settings.data_or_task for one in summaries}) == 1


@dataclass(frozen=True, slots=True)
class TargetSummary:
    group: RunGroup
    target: Target
    seconds: list[float]
    """Training time of the runs that reached it."""
    runs: int
    finals: list[float]
    """At the end of each run: a run without intermediate evaluations can end beyond its target."""
    best: float | None


def summarize_target(groups: Sequence[RunGroup]) -> list[TargetSummary]:
    """Groups that had a target."""
    return [
        TargetSummary(
            group,
            target,
            known(run.seconds_to_target for run in group.runs),
            len(group.runs),
            group.finals(target.key),
            (max if target.figure == "accuracy" else min)(
                known(entry.get(target.key) for run in group.runs for entry in run.history),
                default=None,
            ),
        )
        for group in groups
        if group.runs and (target := group.settings.target) is not None
    ]
