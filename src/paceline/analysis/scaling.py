"""Speedup and efficiency against the number of workers, strong and weak scaling apart."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.contention import disturbances
from paceline.analysis.phases import (
    PhaseBreakdown,
    epoch_seconds,
    exchange_seconds_in_epoch,
    hidden_seconds_in_epoch,
    iteration_breakdown,
)
from paceline.analysis.run_group import IGNORED_FIELDS, RunGroup, differing, setting_text
from paceline.analysis.statistics import correct, relative_increase
from paceline.analysis.validation import is_number
from paceline.config import RunConfig

KINDS = ("strong", "weak")
NOISE = 0.05
"""Efficiencies of single runs exceed 100% by up to this much without a reason."""
NOTHING = 0.0005
"""A smaller share is shown as 0.0%."""

_OF_WAY = ("slow", "shares", "communicator")
"""Settings of how workers are kept in step, besides the strategy and its options."""
_USUAL = {name: getattr(RunConfig(), name) for name in _OF_WAY}

_OF_SCALE = IGNORED_FIELDS | {
    "nnodes", "nproc_per_node", "hosts", "cluster", "batch_size", "batch_per_worker", "strategy",
    "options", "threads", "epochs", "iterations", "launcher", "elastic", *_OF_WAY,
}  # fmt: skip
"""Settings that may differ within a family, or are looked at one by one."""


@dataclass(frozen=True, slots=True)
class ScalePoint:
    cell: RunGroup
    workers: int
    label: str
    throughputs: list[float]
    """Samples a second of each finished run."""
    speedups: list[float]
    """Of each run, over the mean of the base."""
    epoch_seconds: list[float]
    exchange_seconds_in_epoch: list[float]
    """Exposed communication."""
    hidden_seconds_in_epoch: list[float]
    split: PhaseBreakdown | None
    """Of an iteration."""

    @property
    def speedup(self) -> float:
        return sum(self.speedups) / len(self.speedups)


@dataclass(frozen=True, slots=True)
class ScalingSeries:
    """Cells that differ only in the number of workers, and the one they are held against."""

    name: str
    """The way, with the batch where several families go the same way."""
    batch: str
    kind: str
    """One of KINDS."""
    base_workers: int
    points: list[ScalePoint]
    """The base first, then by workers."""

    def efficiency(self, point: ScalePoint) -> float:
        return point.speedup * self.base_workers / point.workers

    def is_superlinear(self, point: ScalePoint) -> bool:
        """Whether its efficiency is above 100% beyond the noise between runs."""
        base = self.points[0]
        if point is base or self.efficiency(point) <= 1 + NOTHING:
            return False
        ideal = [self.base_workers / point.workers * one for one in point.throughputs]
        # Any point of the series may stand out, so all of them are one family of comparisons.
        (gap,) = correct([relative_increase(ideal, base.throughputs)], len(self.points) - 1)
        return gap.is_significant if gap.across_runs else self.efficiency(point) > 1 + NOISE


def throughputs(cell: RunGroup) -> list[float]:
    return [cell.samples_in_iteration / seconds for seconds in cell.iteration_means if seconds]


def families(cells: Sequence[RunGroup]) -> list[ScalingSeries]:
    """Every set of cells that tells how something scales; one cell can be in several."""
    timed = [cell for cell in cells if cell.timed and throughputs(cell)]
    groups: dict[str, list[RunGroup]] = {}
    for cell in timed:
        groups.setdefault(_surroundings(cell.config), []).append(cell)
    names = _names_of([group[0].config for group in groups.values()])
    found = [
        dataclasses.replace(family, name=", ".join(filter(None, (family.name, name))))
        for group, name in zip(groups.values(), names, strict=True)
        for way in dict.fromkeys(_way(cell.config) for cell in group if cell.workers > 1)
        for kind in KINDS
        for family in _of_kind(group, way, kind)
    ]
    ways = [(family.name, family.kind) for family in found]
    return [
        dataclasses.replace(family, name=f"{family.name}, {family.batch}")
        if ways.count((family.name, family.kind)) > 1
        else family
        for family in found
    ]


def _names_of(configs: Sequence[RunConfig]) -> list[str]:
    """What sets the surroundings of families apart; empty where there is only one kind."""
    names = [name for name in differing(configs) if name not in _OF_SCALE]
    clusters = [_cluster(config) for config in configs]
    return [
        ", ".join(
            [
                *(setting_text(name, getattr(config, name)) for name in names),
                *([f"cluster {cluster or 'none'}"] if len(set(clusters)) > 1 else []),
            ]
        )
        for config, cluster in zip(configs, clusters, strict=True)
    ]


def _of_kind(cells: Sequence[RunGroup], way: str, kind: str) -> list[ScalingSeries]:
    """One worker has nothing to keep in step: whatever it is called, it is the base of all."""
    own = [cell for cell in cells if _way(cell.config) == way or cell.workers == 1]
    groups: dict[int, list[RunGroup]] = {}
    for cell in own:
        batch = cell.config.global_batch_size
        size = batch if kind == "strong" else round(batch / cell.workers)
        groups.setdefault(size, []).append(cell)
    return [
        dataclasses.replace(family, name=way) if _is_of_several(family.name, cells) else family
        for size, group in groups.items()
        if (family := _family(group, way, kind, f"batch {size}")) is not None
    ]


def _is_of_several(name: str, cells: Sequence[RunGroup]) -> bool:
    """Whether a study calls more than one way so, because another of its axes sets them apart."""
    named = [cell for cell in cells if cell.workers > 1 and cell.axes.get("strategy") == name]
    return len({_way(cell.config) for cell in named}) > 1


def _family(cells: Sequence[RunGroup], way: str, kind: str, batch: str) -> ScalingSeries | None:
    by_workers: dict[int, RunGroup] = {}
    for cell in cells:
        # Of two with one worker, the one that is named alike comes first.
        if cell.workers not in by_workers or _way(cell.config) == way:
            by_workers[cell.workers] = cell
    if len(by_workers) < 2:
        return None
    ordered = [by_workers[count] for count in sorted(by_workers)]
    base = throughputs(ordered[0])
    mean = sum(base) / len(base)
    unit = "a worker" if kind == "weak" else "in all"
    points = [
        ScalePoint(
            cell,
            cell.workers,
            cell.label,
            throughputs(cell),
            [throughput / mean for throughput in throughputs(cell)],
            cell.values(epoch_seconds, cell.timed),
            cell.values(exchange_seconds_in_epoch, cell.timed),
            cell.values(hidden_seconds_in_epoch, cell.timed),
            iteration_breakdown(cell),
        )
        for cell in ordered
    ]
    # A study has its own names for what it compares.
    name = ordered[-1].axes.get("strategy", way)
    return ScalingSeries(name, f"{batch} {unit}", kind, ordered[0].workers, points)


def _way(config: RunConfig) -> str:
    words = [f"{config.strategy} {setting_text('options', config.options)}".strip()]
    words += [
        setting_text(name, getattr(config, name))
        for name in _OF_WAY
        if getattr(config, name) != _USUAL[name]
    ]
    return ", ".join(words)


def _cluster(config: RunConfig) -> str:
    """Whatever its number of nodes."""
    return re.sub(r"nodes=\d+,?", "", config.cluster or "")


def _surroundings(config: RunConfig) -> str:
    values = [
        getattr(config, item.name)
        for item in dataclasses.fields(RunConfig)
        if item.name not in _OF_SCALE
    ]
    return repr([*values, _cluster(config)])


@dataclass(frozen=True, slots=True)
class SuperlinearCauses:
    """Why the base was slow or the point fast, as far as the records show."""

    contention: float | None
    """The share of the CPU that other processes used."""
    threads: tuple[int, int] | None
    """Per worker in the base and in the point, where the point has more."""
    cores: float | None
    """Of the machine, where the speedup exceeds them: then the base was slow."""


def superlinear_causes(series: ScalingSeries, point: ScalePoint) -> SuperlinearCauses:
    base = series.points[0]
    shares = [one.share for one in disturbances([base.cell, point.cell])]
    cores = _cores(base.cell)
    # Without a setting, workers share the cores: the total is the same and explains nothing.
    before, after = base.cell.config.threads, point.cell.config.threads
    has_more = before and after and before < after and after * point.workers <= (cores or math.inf)
    return SuperlinearCauses(
        max(shares, default=None),
        (before, after) if before and after and has_more else None,
        cores if cores is not None and point.speedup > cores else None,
    )


def _cores(cell: RunGroup) -> float | None:
    """Of the machine; None where several machines or GPUs compute, or it is not known."""
    hardware = (cell.finished[0].result or {}).get("hardware", {})
    cores = hardware.get("cores")
    is_other = cell.config.nnodes > 1 or hardware.get("gpus")
    return float(cores) if is_number(cores) and not is_other else None
