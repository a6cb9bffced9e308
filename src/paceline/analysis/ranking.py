"""Ranking of configurations by a measure that is fair to all of them, exact ones apart.

An exact configuration computes what a single worker computes, up to rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.analysis.run_group import RunGroup, scales_to_samples
from paceline.analysis.statistics import Difference, Sample, against_first
from paceline.config import RunSettings

LOSSLESS_CODECS = frozenset(("none",))


@dataclass(frozen=True, slots=True)
class Deviation:
    """How a run differs from synchronous training on the same batches."""

    kind: Literal["lossy codec", "user strategy", "elastic averaging", "local steps", "staleness"]
    setting: str = ""
    """The codec, or the mode of the parameter server."""


def deviation(settings: RunSettings) -> Deviation | None:
    """None for an exact run, and for a script whose strategy is not known."""
    codec = str(settings.options.get("codec", "none"))
    if codec not in LOSSLESS_CODECS:
        return Deviation("lossy codec", codec)
    if ":" in (settings.strategy or ""):
        return Deviation("user strategy")
    if settings.strategy == "easgd":
        return Deviation("elastic averaging")
    if settings.workers == 1:
        return None
    if settings.strategy == "local_sgd" and not _averages_every_step(settings):
        return Deviation("local steps")
    if settings.strategy == "parameter_server":
        mode = settings.options.get("mode", "sync")
        return None if mode == "sync" else Deviation("staleness", str(mode))
    return None


def _averages_every_step(settings: RunSettings) -> bool:
    """Averaged weights equal a step with the mean gradient, if a step is linear in the gradient."""
    known = settings.config
    if known is None:
        return False
    is_linear = known.optimizer == "sgd" and known.clip_norm is None and not known.shares
    return is_linear and str(settings.options.get("every", "")) == "1"


def is_exact(group: RunGroup) -> bool:
    return deviation(group.settings) is None


def deviations(groups: Sequence[RunGroup]) -> list[tuple[RunGroup, Deviation]]:
    """The approximate configurations, each with its deviation."""
    found = ((group, deviation(group.settings)) for group in groups if group.runs)
    return [(group, one) for group, one in found if one is not None]


TO_TARGET = "to the target"


@dataclass(frozen=True, slots=True)
class RankedGroup:
    """The values of a group, in seconds: less is faster."""

    group: RunGroup
    values: list[float]
    """One per finished run."""
    blocks: list[float]
    """Means of blocks of iterations of the first run, where iterations are ranked."""

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


@dataclass(frozen=True, slots=True)
class Ranking:
    name: str
    """As in `12 ms per iteration`."""
    entries: list[RankedGroup]
    """The fastest first; groups without a finished run are not in it."""

    @property
    def samples(self) -> list[Sample]:
        return [Sample(ranked.values, ranked.blocks) for ranked in self.entries]

    def split_exact(self) -> tuple[Ranking, Ranking]:
        """Exact and approximate groups: a step of the latter has a different result.

        Time to a target is fair to both, so all stay in one ranking.
        """
        if self.name == TO_TARGET:
            return self, Ranking(self.name, [])
        exact = [ranked for ranked in self.entries if is_exact(ranked.group)]
        others = [ranked for ranked in self.entries if not is_exact(ranked.group)]
        return Ranking(self.name, exact), Ranking(self.name, others)


def rank_groups(groups: Sequence[RunGroup]) -> Ranking:
    """By time to the target if all have the same and some reached it, else by step time."""
    targets = {group.settings.target for group in groups if group.finished}
    to_target = [ranked for group in groups if (ranked := _to_target(group)) is not None]
    if to_target and len(targets) == 1:
        return Ranking(TO_TARGET, _fastest_first(to_target))
    return rank_by_step_time(groups)


def rank_by_step_time(groups: Sequence[RunGroup]) -> Ranking:
    """By time per iteration, or per 1,000 samples where batch sizes differ."""
    timed = [group for group in groups if group.timed]
    scales = scales_to_samples(timed)
    if scales is None:
        return Ranking("per iteration", _fastest_first([_scaled(group, 1.0) for group in timed]))
    scaled = [_scaled(group, scale) for group, scale in zip(timed, scales, strict=True)]
    return Ranking("per 1,000 samples", _fastest_first(scaled))


def _fastest_first(entries: Sequence[RankedGroup]) -> list[RankedGroup]:
    return sorted(entries, key=lambda one: one.mean)


def _scaled(group: RunGroup, factor: float) -> RankedGroup:
    timing = group.timed[0].timing
    blocks = timing.blocks if timing is not None else []
    return RankedGroup(
        group,
        [seconds * factor for seconds in group.iteration_means],
        [seconds * factor for seconds in blocks],
    )


def _to_target(group: RunGroup) -> RankedGroup | None:
    """None unless every run of the group reached its target."""
    seconds = [spent for run in group.finished if (spent := run.seconds_to_target) is not None]
    if not seconds or len(seconds) < len(group.runs):
        return None
    return RankedGroup(group, seconds, [])


@dataclass(frozen=True, slots=True)
class ConditionRanking:
    """Choices ranked under one condition. The last axis of a study is what can be chosen, the
    others are the condition."""

    condition: str
    ranking: Ranking
    """Of the exact choices where there are any, else of all; labeled by choice."""
    lead: Difference | None
    """How much longer the second takes; None without one."""
    approximate: Ranking | None = None
    """Of approximate choices, where there are exact ones too."""
    approximate_lead: Difference | None = None

    @property
    def fastest(self) -> str:
        return self.ranking.entries[0].group.label

    @property
    def is_clear(self) -> bool:
        return self.lead is not None and self.lead.is_significant


def rank_by_condition(groups: Sequence[RunGroup]) -> list[ConditionRanking]:
    """Empty if groups have fewer than two axes, or a condition has only one choice."""
    # Keyed by the chosen axis too: groups that a study includes may lack its last axis.
    by_condition: dict[tuple[str, str], list[RunGroup]] = {}
    for group in groups:
        if len(group.axes) > 1 and group.timed:
            *given, (chosen, choice) = group.axes.items()
            condition = ", ".join(_axis_label(axis, value) for axis, value in given)
            labeled = dataclasses.replace(group, label=_axis_label(chosen, choice))
            by_condition.setdefault((condition, chosen), []).append(labeled)
    # One metric for all, because they share a table.
    overall = rank_by_step_time([group for members in by_condition.values() for group in members])
    found: list[tuple[str, Ranking, Ranking]] = []
    for (condition, _), members in by_condition.items():
        own = {id(group) for group in members}
        ranked = [one for one in overall.entries if id(one.group) in own]
        exact, others = Ranking(overall.name, ranked).split_exact()
        if len(members) > 1:
            found.append((condition, exact, others))
    # Shown together, so all their pairs are one family of comparisons.
    gaps = iter(against_first([ranking.samples for _, *both in found for ranking in both]))
    leads = [[own[0] if own else None for own in (next(gaps), next(gaps))] for _ in found]
    return [
        ConditionRanking(condition, exact, exact_lead, others, others_lead)
        if exact.entries and others.entries
        else ConditionRanking(
            condition, *((exact, exact_lead) if exact.entries else (others, others_lead))
        )
        for (condition, exact, others), (exact_lead, others_lead) in zip(found, leads, strict=True)
    ]


def _axis_label(axis: str, value: str) -> str:
    """The value, with the name of its axis if it is only a number."""
    if any(letter.isalpha() for letter in value):
        return value
    return f"{axis.rpartition('.')[2].replace('_', ' ')} {value}"
