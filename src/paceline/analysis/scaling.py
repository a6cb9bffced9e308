"""Speedup and efficiency against the number of workers, for strong and weak scaling."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.contention import find_contention
from paceline.analysis.phases import (
    PhaseBreakdown,
    epoch_seconds,
    exchange_seconds_in_epoch,
    iteration_breakdown,
    overlapped_seconds_in_epoch,
)
from paceline.analysis.run_group import IGNORED_FIELDS, RunGroup, differing, setting_text
from paceline.analysis.statistics import Difference, correct, relative_increase
from paceline.analysis.validation import is_number
from paceline.config import RunConfig, RunSettings

KINDS = ("strong", "weak")
NOISE = 0.05
"""Efficiencies of single runs exceed 100% by this much without any cause."""
NEGLIGIBLE = 0.0005
"""A share that is below the resolution of the clock."""

_STRATEGY_FIELDS = ("slow", "shares", "communicator")
"""Settings that belong to the strategy, besides its name and options."""
_DEFAULTS = {name: getattr(RunConfig(), name) for name in _STRATEGY_FIELDS}

_SERIES_FIELDS = IGNORED_FIELDS | {
    "nnodes", "nproc_per_node", "world_size", "hosts", "cluster", "batch_size", "batch_per_worker",
    "strategy", "options", "threads", "epochs", "iterations", "launcher", "elastic",
    *_STRATEGY_FIELDS,
}  # fmt: skip
"""Settings that may differ within a series, or are compared one by one."""


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    group: RunGroup
    workers: int
    label: str
    throughputs: list[float]
    """Samples per second of each finished run."""
    speedups: list[float]
    """Of each run, over the mean of the base."""
    epoch_seconds: list[float]
    exchange_seconds_in_epoch: list[float]
    """Exposed communication."""
    overlapped_seconds_in_epoch: list[float]
    """Overlapped communication."""
    split: PhaseBreakdown | None
    """Of one iteration."""

    @property
    def speedup(self) -> float:
        return sum(self.speedups) / len(self.speedups)

    @property
    def has_exposed_communication(self) -> bool:
        return sum(self.exchange_seconds_in_epoch) > NEGLIGIBLE * sum(self.epoch_seconds)


@dataclass(frozen=True, slots=True)
class ScalingSeries:
    """Groups that differ only in the number of workers."""

    name: str
    """The strategy, with the batch where several series share one."""
    batch: str
    kind: str
    """One of KINDS."""
    base_workers: int
    points: list[ScalingPoint]
    """The base first, then by workers."""

    def efficiency(self, point: ScalingPoint) -> float:
        return point.speedup * self.base_workers / point.workers

    def speedup_change(self, point: ScalingPoint) -> Difference:
        """How much more samples per second than the base, as a share of its."""
        return relative_increase(point.throughputs, self.points[0].throughputs)

    def ideal_compute_seconds(self, base_seconds: float, point: ScalingPoint) -> float:
        """Compute time of an iteration with ideal scaling, given that of the base."""
        if self.kind == "weak":
            return base_seconds
        return base_seconds * self.base_workers / point.workers

    def is_superlinear(self, point: ScalingPoint) -> bool:
        """Whether its efficiency is above 100% beyond the noise between runs."""
        base = self.points[0]
        if point is base or self.efficiency(point) <= 1 + NEGLIGIBLE:
            return False
        ideal = [self.base_workers / point.workers * one for one in point.throughputs]
        # Any point of the series may stand out, so all of them are one family of comparisons.
        (gap,) = correct([relative_increase(ideal, base.throughputs)], len(self.points) - 1)
        return gap.is_significant if gap.across_runs else self.efficiency(point) > 1 + NOISE


def scaling_series(groups: Sequence[RunGroup]) -> list[ScalingSeries]:
    """Every set of groups that shows how a strategy scales; a group can be in several."""
    timed = [group for group in groups if group.timed and _throughputs(group)]
    by_environment: dict[str, list[RunGroup]] = {}
    for group in timed:
        by_environment.setdefault(_environment(group.settings), []).append(group)
    names = _environment_names([members[0].settings for members in by_environment.values()])
    found = [
        dataclasses.replace(series, name=", ".join(filter(None, (series.name, name))))
        for members, name in zip(by_environment.values(), names, strict=True)
        for strategy in dict.fromkeys(
            _strategy_name(group.settings) for group in members if group.workers > 1
        )
        for kind in KINDS
        for series in _series_of_kind(members, strategy, kind)
    ]
    taken = [(series.name, series.kind) for series in found]
    return [
        dataclasses.replace(series, name=f"{series.name}, {series.batch}")
        if taken.count((series.name, series.kind)) > 1
        else series
        for series in found
    ]


def _throughputs(group: RunGroup) -> list[float]:
    samples = group.samples_in_iteration
    return [samples / seconds for seconds in group.iteration_means if seconds] if samples else []


def _environment(settings: RunSettings) -> str:
    """Equal for groups that can be in one series."""
    return f"{settings.key(_SERIES_FIELDS)} {_cluster(settings)}"


def _environment_names(settings: Sequence[RunSettings]) -> list[str]:
    """The settings that distinguish environments; empty names if there is only one."""
    names = [name for name in differing(settings) if name not in _SERIES_FIELDS]
    clusters = [_cluster(one) for one in settings]
    return [
        ", ".join(
            [
                *(setting_text(name, one.get(name)) for name in names if one.get(name) is not None),
                *([f"cluster {cluster or 'none'}"] if len(set(clusters)) > 1 else []),
            ]
        )
        for one, cluster in zip(settings, clusters, strict=True)
    ]


def _cluster(settings: RunSettings) -> str:
    """The cluster without its number of nodes."""
    return re.sub(r"nodes=\d+,?", "", settings.cluster or "")


def _strategy_name(settings: RunSettings) -> str:
    strategy = settings.strategy or settings.task
    parts = [f"{strategy} {setting_text('options', settings.options)}".strip()]
    parts += [
        setting_text(name, settings.get(name))
        for name in _STRATEGY_FIELDS
        if settings.get(name) not in (None, _DEFAULTS[name])
    ]
    return ", ".join(parts)


def _series_of_kind(groups: Sequence[RunGroup], strategy: str, kind: str) -> list[ScalingSeries]:
    """Series by batch. A single worker does not synchronize, so it is the base of any strategy."""
    members = [
        group
        for group in groups
        if _strategy_name(group.settings) == strategy or group.workers == 1
    ]
    by_size: dict[int, list[RunGroup]] = {}
    for group in members:
        batch = group.batch_size
        if batch is None:
            continue
        size = batch if kind == "strong" else round(batch / group.workers)
        by_size.setdefault(size, []).append(group)
    return [
        dataclasses.replace(series, name=strategy) if _is_ambiguous(series.name, groups) else series
        for size, same_size in by_size.items()
        if (series := _series(same_size, strategy, kind, f"batch {size}")) is not None
    ]


def _is_ambiguous(name: str, groups: Sequence[RunGroup]) -> bool:
    """Whether a study's label stands for several strategies, which another axis distinguishes."""
    named = [group for group in groups if group.workers > 1 and group.axes.get("strategy") == name]
    return len({_strategy_name(group.settings) for group in named}) > 1


def _series(
    groups: Sequence[RunGroup], strategy: str, kind: str, batch: str
) -> ScalingSeries | None:
    by_workers: dict[int, RunGroup] = {}
    for group in groups:
        # Of several groups with one worker, prefer that of the same strategy.
        if group.workers not in by_workers or _strategy_name(group.settings) == strategy:
            by_workers[group.workers] = group
    if len(by_workers) < 2:
        return None
    ordered = [by_workers[count] for count in sorted(by_workers)]
    base = _throughputs(ordered[0])
    mean = sum(base) / len(base)
    unit = "per worker" if kind == "weak" else "in total"
    points = [
        ScalingPoint(
            group,
            group.workers,
            group.label,
            _throughputs(group),
            [throughput / mean for throughput in _throughputs(group)],
            group.values(epoch_seconds, group.timed),
            group.values(exchange_seconds_in_epoch, group.timed),
            group.values(overlapped_seconds_in_epoch, group.timed),
            iteration_breakdown(group),
        )
        for group in ordered
    ]
    # A study has its own labels for strategies.
    name = ordered[-1].axes.get("strategy", strategy)
    return ScalingSeries(name, f"{batch} {unit}", kind, ordered[0].workers, points)


@dataclass(frozen=True, slots=True)
class SuperlinearCauses:
    """What the records show about an efficiency above 100%; None where it does not apply."""

    contention: float | None
    """CPU share of other processes during the runs."""
    threads: tuple[int, int] | None
    """Threads per worker of the base and of the point, where the point has more."""
    cores: float | None
    """Cores of the machine, where the speedup exceeds them: the base was slow."""


def superlinear_causes(series: ScalingSeries, point: ScalingPoint) -> SuperlinearCauses:
    base = series.points[0]
    shares = [one.share for one in find_contention([base.group, point.group])]
    cores = _cores(base.group)
    # Without the setting, workers share the cores: the total is the same and explains nothing.
    before, after = base.group.settings.threads, point.group.settings.threads
    has_more_threads = (
        before and after and before < after and after * point.workers <= (cores or math.inf)
    )
    return SuperlinearCauses(
        max(shares, default=None),
        (before, after) if before and after and has_more_threads else None,
        cores if cores is not None and point.speedup > cores else None,
    )


def _cores(group: RunGroup) -> float | None:
    """Cores of the machine; None with several machines or GPUs, or if unknown."""
    hardware = (group.finished[0].result or {}).get("hardware", {})
    cores = hardware.get("cores")
    is_other = group.settings.nnodes > 1 or hardware.get("gpus")
    return float(cores) if is_number(cores) and not is_other else None
