"""Speedup and efficiency against the number of workers, strong and weak scaling apart."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline import formatting
from paceline.analysis.contention import disturbances
from paceline.analysis.phases import (
    COMPUTE_PHASES,
    PhaseBreakdown,
    epoch_seconds,
    exchange_seconds_in_epoch,
    hidden_seconds_in_epoch,
    iteration_breakdown,
)
from paceline.analysis.ranking import is_exact
from paceline.analysis.run_group import IGNORED_FIELDS, RunGroup, differing, setting_text
from paceline.analysis.statistics import correct, relative_increase
from paceline.analysis.validation import is_number
from paceline.config import RunConfig
from paceline.report.charts.lines import LineChart, Series, draw_lines
from paceline.report.document import Block, BulletList, Figure, Table, Text
from paceline.report.sections.outline import SectionContext, known
from paceline.report.sections.phases import NOT_MEASURED

TITLE = "Scaling"
MOST_TOLD = 4
NOISE = 0.05
"""Efficiencies of single runs are above 100% by so much without any reason."""
NOTHING = 0.0005
"""Communication of a smaller share of an epoch is none: the clock changed phases, that was all."""

KINDS = {
    "strong": "the global batch stays the same, each worker gets less of it",
    "weak": "each worker's batch stays the same, the global batch grows",
}

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
        for kind in ("strong", "weak")
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
            known(map(epoch_seconds, cell.timed)),
            known(map(exchange_seconds_in_epoch, cell.timed)),
            known(map(hidden_seconds_in_epoch, cell.timed)),
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


def build(outline: SectionContext) -> list[Block]:
    blocks: list[Block] = []
    found = families(outline.cells)
    by_kind = {kind: [family for family in found if family.kind == kind] for kind in KINDS}
    # What was meant has more families; a few of the other kind come about where batches meet.
    for kind, own in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        if own:
            blocks += [
                Text(f"{kind.capitalize()} scaling: {KINDS[kind]}."),
                Text(answer(own), "answer"),
                *_figures(outline, kind, own),
                _table(own),
                BulletList(
                    [(f"{family.name}:", text) for family in own if (text := _why(family))]
                    + [
                        (f"{family.name}, {point.workers} workers:", f"{flag}.")
                        for family in own
                        for point in family.points
                        if family.is_superlinear(point) and (flag := efficiency_text(family, point))
                    ]
                ),
            ]
    if blocks:
        blocks.append(
            Text(
                "Speedup: samples per second over those of the fewest workers. Efficiency: speedup"
                " over the ideal. Communication per epoch is exposed communication. Whiskers:"
                " min–max of the repeats.",
                "note",
            )
        )
    return blocks


def answer(found: Sequence[ScalingSeries]) -> str:
    """With most workers: how much faster each is than with the fewest."""
    most = max(family.points[-1].workers for family in found)
    reach = [(family, last) for family in found if (last := family.points[-1]).workers == most]
    reach.sort(key=lambda one: -one[1].speedup)
    bases = {family.base_workers for family, _ in reach}
    texts = [
        f"{family.name}{'' if is_exact(last.cell) else ' (approximate)'}"
        f" {last.speedup:.2f} times as fast"
        + (f" as with {family.base_workers}" if len(bases) > 1 else "")
        + f" ({efficiency_text(family, last)})"
        for family, last in reach[:MOST_TOLD]
    ]
    more = f"; and {len(reach) - MOST_TOLD} more" if len(reach) > MOST_TOLD else ""
    instead = f" instead of {bases.pop()}" if len(bases) == 1 else ""
    return f"With {most} workers{instead}: {'; '.join(texts)}{more}."


def efficiency_text(family: ScalingSeries, point: ScalePoint) -> str:
    """Above 100% beyond noise with its likely reason, since linear speedup is the limit."""
    text = f"efficiency {formatting.share(family.efficiency(point))}"
    if not family.is_superlinear(point):
        return text
    return f"{text}, above 100%; likely reason: {superlinear_reason(family, point)}"


def superlinear_reason(family: ScalingSeries, point: ScalePoint) -> str:
    """Why the base was slow, or the point fast, as far as the records show."""
    base = family.points[0]
    reasons = []
    busy = {one.label: one.share for one in disturbances([base.cell, point.cell])}
    if busy:
        used = formatting.share(max(busy.values()))
        reasons.append(f"CPU contention (other processes used up to {used} of the machine)")
    cores = _cores(base.cell)
    # Without a setting, workers share the cores: the total is the same and explains nothing.
    before, after = base.cell.config.threads, point.cell.config.threads
    if before and after and before < after and after * point.workers <= (cores or math.inf):
        reasons.append(f"threads ({before} per worker in the base, {after} here)")
    if cores is not None and point.speedup > cores:
        reasons.append(
            f"a slow base run ({cores:g} cores cannot give a speedup of {point.speedup:.2f})"
        )
    if reasons:
        return " and ".join(reasons)
    if family.kind == "strong":
        return "CPU cache (each worker has a smaller batch) or a slow base run"
    return "a slow base run"


def superlinear_note(winners: Sequence[RunGroup], cells: Sequence[RunGroup]) -> str:
    """A sentence for each winner whose efficiency is above 100%; empty where there is none."""
    flagged = {
        id(point.cell): f" {point.cell.label}: scaling {efficiency_text(family, point)}."
        for family in families(cells)
        for point in family.points
        if family.is_superlinear(point)
    }
    return "".join(flagged.get(id(cell), "") for cell in winners)


def _cores(cell: RunGroup) -> float | None:
    """Of the machine; None where several machines or GPUs compute, or it is not known."""
    hardware = (cell.finished[0].result or {}).get("hardware", {})
    cores = hardware.get("cores")
    is_other = cell.config.nnodes > 1 or hardware.get("gpus")
    return float(cores) if is_number(cores) and not is_other else None


def _why(family: ScalingSeries) -> str:
    """What became of an iteration from the fewest workers to the most; empty without phases."""
    base, last = family.points[0], family.points[-1]
    if base.split is None or last.split is None:
        return ""
    before, after = base.split.of(COMPUTE_PHASES), last.split.of(COMPUTE_PHASES)
    shrunk = family.kind == "strong"
    ideal = before * base.workers / last.workers if shrunk else before
    little = 0.005 * last.split.total
    parts = [
        f"{name} from {formatting.seconds(first) if first > little else 'nothing'} to"
        f" {formatting.seconds(then) if then > little else 'nothing'}"
        for name, phase in (("communication", "exchange"), ("waiting", "wait"))
        if max(first := base.split.seconds[phase], then := last.split.seconds[phase]) > little
    ]
    return (
        f"from {base.workers} to {last.workers} workers, compute goes from"
        f" {formatting.seconds(before)} to {formatting.seconds(after)} per iteration"
        f" (ideal: {formatting.seconds(ideal)}){''.join(f', {part}' for part in parts)}."
    )


def _figures(outline: SectionContext, kind: str, found: Sequence[ScalingSeries]) -> list[Block]:
    counts = sorted({point.workers for family in found for point in family.points})
    bases = sorted({family.base_workers for family in found})
    speedups = [
        Series(
            "ideal" if base == bases[0] else f"ideal from {base} on",
            [count for count in counts if count >= base],
            [count / base for count in counts if count >= base],
            is_guide=True,
        )
        for base in bases
    ]
    efficiencies = [Series("ideal", counts, [1.0] * len(counts), is_guide=True)]
    for place, family in enumerate(found[:8]):
        workers = [point.workers for point in family.points]
        lows = [min(point.speedups) for point in family.points]
        highs = [max(point.speedups) for point in family.points]
        ideals = [count / family.base_workers for count in workers]
        means = [point.speedup for point in family.points]
        speedups.append(Series(family.name, workers, means, lows, highs, place))
        share, low, high = (
            [value / full for value, full in zip(values, ideals, strict=True)]
            for values in (means, lows, highs)
        )
        efficiencies.append(Series(family.name, workers, share, low, high, place))
    charts = (
        LineChart(f"Speedup against workers, {kind} scaling", "workers", "speedup", speedups,
                  from_zero=True, x_ticks=counts),
        LineChart(f"Efficiency against workers, {kind} scaling", "workers", "efficiency",
                  efficiencies, y_quantity="share", from_zero=True, x_ticks=counts),
    )  # fmt: skip
    return [
        Figure(outline.figure("scaling", f"{kind}-{chart.y_label}"), chart.label, draw_lines(chart))
        for chart in charts
    ]


def _overlapped(point: ScalePoint) -> str:
    if point.workers == 1:
        return "none"
    if len(point.hidden_seconds_in_epoch) < len(point.epoch_seconds):
        return NOT_MEASURED
    return formatting.spread(point.hidden_seconds_in_epoch, formatting.seconds)


def _table(found: Sequence[ScalingSeries]) -> Table:
    rows = [
        (
            family.name,
            family.batch.removeprefix("batch "),
            str(point.workers),
            formatting.spread(point.throughputs, lambda value: f"{value:,.0f}"),
            formatting.spread(point.speedups, lambda value: f"{value:.2f}"),
            formatting.share(family.efficiency(point)),
            formatting.spread(point.epoch_seconds, formatting.seconds),
            formatting.spread(point.exchange_seconds_in_epoch, formatting.seconds)
            if sum(point.exchange_seconds_in_epoch) > NOTHING * sum(point.epoch_seconds)
            else "-",
            _overlapped(point),
        )
        for family in found
        for point in family.points
    ]
    columns = ("strategy", "batch", "workers", "samples per second", "speedup", "efficiency",
               "time per epoch", "communication per epoch", "overlapped per epoch")  # fmt: skip
    return Table(columns, rows)
