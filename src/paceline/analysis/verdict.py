"""What the records of a set of configurations show: the fastest, why, and everything unusual.

Findings are data; report/wording phrases them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.analysis.accuracy import (
    ACCURACY,
    AccuracyDifference,
    ChanceAccuracy,
    Quality,
    TrainingLengths,
    compare_accuracy,
    compare_training_lengths,
    find_chance_accuracy,
    quality_of,
)
from paceline.analysis.communication import read_comm_measurements
from paceline.analysis.contention import CpuContention, find_contention
from paceline.analysis.phases import Bottleneck, Explanation, explain, find_bottleneck
from paceline.analysis.ranking import TO_TARGET, RankedGroup, Ranking, rank_groups
from paceline.analysis.ranks import Straggler, find_straggler
from paceline.analysis.recommendations import Recommendation, recommend
from paceline.analysis.run_group import RunGroup
from paceline.analysis.scaling import ScalingPoint, ScalingSeries, scaling_series
from paceline.analysis.script.findings import (
    ScriptFinding,
    group_core_wait,
    group_findings,
    is_fault,
)
from paceline.analysis.statistics import Difference, against_first

MOST_ACCURACY_LOST = 0.01
"""Accuracy that the fastest configuration may lose without a finding; of a test loss, the share
that it may have more."""


@dataclass(frozen=True, slots=True)
class AccuracyLoss:
    """The fastest configuration is less accurate than another one, or has a higher test loss."""

    quality: Quality
    fastest: float
    best: float
    best_label: str
    difference: AccuracyDifference


@dataclass(frozen=True, slots=True)
class ScriptVerdict:
    """What was found in a profiled script."""

    label: str
    """Of the group."""
    findings: list[ScriptFinding]
    core_wait: float | None = None
    """On a busy machine: the share of the time in which a rank had no core, at most."""

    @property
    def faults(self) -> list[ScriptFinding]:
        return [one for one in self.findings if is_fault(one)]


@dataclass(slots=True)
class Verdict:
    groups: Sequence[RunGroup] = ()
    ranking: Ranking | None = None
    """Of the exact configurations where there are any, else of all; None if none are comparable."""
    approximate: Ranking | None = None
    """Of approximate configurations, where they are ranked apart from exact ones."""
    has_several_kinds: bool = False
    """Whether models or datasets differ; the largest set with the same ones is ranked."""
    others: list[Verdict] = field(default_factory=list)
    """Of the other models and datasets, each on its own."""
    gaps: list[Difference] = field(default_factory=list)
    """How much longer each later configuration of `ranking` takes than the first."""
    approximate_lead: Difference | None = None
    """How much longer the second of `approximate` takes than its first."""
    ties: list[RankedGroup] = field(default_factory=list)
    """Configurations whose difference from the fastest is within noise."""
    clear: tuple[RankedGroup, Difference] | None = None
    """The first significantly slower configuration, where the second is a tie."""
    slowest: RankedGroup | None = None
    """None where it is the second, a tie or `clear`."""
    compared: tuple[RankedGroup, RankedGroup] | None = None
    """The fastest and the one that `explanation` compares it with; None where noise explains it."""
    explanation: Explanation | None = None
    superlinear: list[tuple[ScalingSeries, ScalingPoint]] = field(default_factory=list)
    """Scaling above 100% efficiency of the fastest exact and the fastest approximate one."""
    contention: list[CpuContention] = field(default_factory=list)
    bottlenecks: list[Bottleneck] = field(default_factory=list)
    stragglers: list[Straggler] = field(default_factory=list)
    scripts: list[ScriptVerdict] = field(default_factory=list)
    """Of profiled scripts, which have these instead of bottlenecks and stragglers."""
    accuracy_loss: AccuracyLoss | None = None
    at_chance: list[ChanceAccuracy] = field(default_factory=list)
    """Accuracies that guessing explains."""
    lengths: TrainingLengths | None = None
    """Of the ranked configurations, where they were trained on different numbers of samples."""
    recommendations: list[Recommendation] = field(default_factory=list)

    @property
    def rankings(self) -> list[Ranking]:
        return [one for one in (self.ranking, self.approximate) if one is not None]

    @property
    def lead(self) -> Difference | None:
        """How much longer the second takes than the first."""
        return self.gaps[0] if self.gaps else None


def make_verdict(groups: Sequence[RunGroup], comm: Sequence[Path] = ()) -> Verdict:
    """`comm` are network measurements of `paceline comm --json`."""
    kinds = _by_kind(groups)
    alike = max(kinds.values(), key=len) if len(kinds) > 1 else groups
    exact, approximate = rank_groups(alike).split_exact()
    ranking = exact if exact.entries else approximate
    verdict = Verdict(
        groups,
        has_several_kinds=len(kinds) > 1,
        contention=find_contention(groups),
        at_chance=find_chance_accuracy(groups),
        lengths=compare_training_lengths(alike),
    )
    # On a busy machine contention explains what looks like a straggler or a bottleneck.
    disturbed = {one.label for one in verdict.contention}
    verdict.scripts = [
        ScriptVerdict(
            group.label,
            group_findings(group),
            group_core_wait(group) if group.label in disturbed else None,
        )
        for group in groups
        if group.runs and group.settings.kind == "profile"
    ]
    trained = [group for group in groups if group.runs and group.settings.kind != "profile"]
    verdict.stragglers = [
        one
        for group in trained
        if (one := find_straggler(group)) is not None
        and (group.label not in disturbed or one.is_injected)
    ]
    measured = [one for path in comm for one in read_comm_measurements(path)]
    verdict.bottlenecks = [
        bottleneck
        for group in trained
        if group.label not in disturbed
        and (bottleneck := find_bottleneck(group, measured)) is not None
    ]
    if len(kinds) < 2 or len(alike) > 1:
        verdict.ranking = ranking
        verdict.approximate = approximate if exact.entries and approximate.entries else None
    is_ranked = verdict.ranking is not None and bool(verdict.ranking.entries)
    if is_ranked:
        rank(verdict, disturbed)
        verdict.superlinear = _superlinear(
            [one.entries[0].group for one in verdict.rankings], alike
        )
        verdict.accuracy_loss = _accuracy_loss(ranking.entries)
    if len(kinds) > 1:
        others = [kind for kind in kinds.values() if kind is not alike or not is_ranked]
        verdict.others = [make_verdict(kind) for kind in others]
    verdict.recommendations = recommend(
        verdict.ranking, groups, verdict.gaps, verdict.stragglers, verdict.bottlenecks,
        verdict.contention,
    )  # fmt: skip
    return verdict


def rank(verdict: Verdict, disturbed: Collection[str] = ()) -> None:
    """Compare the rankings of a verdict, all pairs as one family.

    A difference that involves a `disturbed` configuration is not explained by its phases.
    """
    first, *others = against_first([one.samples for one in verdict.rankings])
    verdict.gaps = first
    verdict.approximate_lead = others[0][0] if others and others[0] else None
    assert verdict.ranking is not None
    fastest, *later = verdict.ranking.entries
    if not later:
        return
    gaps = list(zip(later, verdict.gaps, strict=True))
    second, lead = gaps[0]
    # A difference without an interval is not tested, so it is not a tie either.
    verdict.ties = [other for other, gap in gaps if gap.is_tie]
    named, against = [second, *verdict.ties], second
    if lead.is_tie:
        verdict.clear = next(((other, gap) for other, gap in gaps if gap.is_significant), None)
        if verdict.clear is not None:
            against = verdict.clear[0]
            named.append(against)
    if not any(later[-1] is one for one in named):
        verdict.slowest = later[-1]
    is_disturbed = fastest.group.label in disturbed or against.group.label in disturbed
    if not is_disturbed and not any(against is tie for tie in verdict.ties):
        verdict.compared = fastest, against
        verdict.explanation = explain(fastest.group, against.group)


def _by_kind(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """Configurations with a finished run by task, across which times do not compare.

    Times to the same target accuracy on the same data do, whatever the model.
    """
    finished = [group for group in groups if group.finished]
    has_same_data = len({group.settings.data_or_task for group in finished}) == 1
    is_race = has_same_data and rank_groups(finished).name == TO_TARGET
    kinds: dict[str, list[RunGroup]] = {}
    for group in finished:
        kinds.setdefault("any" if is_race else group.settings.task, []).append(group)
    return kinds


def _superlinear(
    winners: Sequence[RunGroup], groups: Sequence[RunGroup]
) -> list[tuple[ScalingSeries, ScalingPoint]]:
    """A winner in several series is named once, by the last of them."""
    flagged = {
        id(point.group): (series, point)
        for series in scaling_series(groups)
        for point in series.points
        if series.is_superlinear(point)
    }
    return [flagged[id(winner)] for winner in winners if id(winner) in flagged]


def _accuracy_loss(ranking: Sequence[RankedGroup]) -> AccuracyLoss | None:
    quality = quality_of(one.group for one in ranking)
    known = [
        (one.group, value)
        for one in ranking
        if (value := one.group.mean_of(quality.key)) is not None
    ]
    if len(known) < 2 or known[0][0] is not ranking[0].group:
        return None
    fastest, own = known[0]
    best, value = max(known, key=lambda item: quality.lead(item[1], own))
    tolerance = MOST_ACCURACY_LOST * (1.0 if quality is ACCURACY else abs(value))
    if quality.lead(value, own) <= tolerance:
        return None
    # The best was selected from all the others, so each of them is a comparison.
    difference = compare_accuracy(best, fastest, quality=quality, comparisons=len(known) - 1)
    return AccuracyLoss(quality, own, value, best.label, difference)
