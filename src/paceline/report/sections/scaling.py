"""What changes with the setup: workers, conditions, batch size and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline import formatting
from paceline.analysis.accuracy import ACCURACY, compare_accuracy, quality_of
from paceline.analysis.phases import COMPUTE_PHASES, explain, iteration_breakdown
from paceline.analysis.ranking import ConditionRanking, RankedGroup, is_exact, rank_by_condition
from paceline.analysis.run_group import RunGroup
from paceline.analysis.scaling import (
    KINDS,
    ScalingPoint,
    ScalingSeries,
    scaling_series,
)
from paceline.analysis.statistics import correct
from paceline.analysis.tradeoffs import (
    BatchSizeSummary,
    CheckpointCost,
    baseline_cost,
    checkpoint_costs,
    compare_batch_sizes,
    differ_in_batch_size_only,
    summarize_batch_sizes,
)
from paceline.report.charts.lines import LineChart, Series
from paceline.report.document import Block, BulletList, Figure, Table, Text
from paceline.report.sections.common import (
    Column,
    SectionContext,
    answer,
    bar_figure,
    line_figure,
    mean_bars,
    note,
    section,
    table,
)
from paceline.report.sections.phases import NOT_MEASURED
from paceline.report.wording.differences import accuracy_note, format_difference, interval_note
from paceline.report.wording.findings import explanation_text
from paceline.report.wording.headline import beside_exact, ranking_headline
from paceline.report.wording.scaling import efficiency_text, speedup_interval

KIND_TEXTS = {
    "strong": "the global batch stays the same, each worker gets less of it",
    "weak": "each worker's batch stays the same, the global batch grows",
}
MAX_SERIES = 8
MAX_ANSWERS = 4
"""Series that the answer names."""


@section("winners", "Fastest by condition")
def winners(context: SectionContext) -> Iterator[Block]:
    rankings = rank_by_condition(context.groups)
    if not rankings:
        return
    yield answer(winners_answer(rankings))
    yield BulletList([(f"{one.condition}:", _condition_text(one)) for one in rankings])
    quality = quality_of(context.groups)
    yield table(
        [row for one in rankings for row in _choices(one)],
        Column("condition", lambda row: row.condition),
        Column(
            "choice", lambda row: row.ranked.group.label + " (approximate)" * row.is_approximate
        ),
        Column(
            f"time {rankings[0].ranking.name}", lambda row: row.ranked.values, formatting.seconds
        ),
        Column(
            "relative to fastest",
            lambda row: f"{row.ranked.mean / row.fastest:.2f}x" if row.fastest else None,
        ),
        Column("compute", lambda row: row.phase_seconds(COMPUTE_PHASES), formatting.seconds),
        Column("communication", lambda row: row.phase_seconds(["exchange"]), formatting.seconds),
        Column("waiting", lambda row: row.phase_seconds(["wait"]), formatting.seconds),
        Column(quality.name, lambda row: row.ranked.group.mean_of(quality.key), formatting.number),
        text_columns=2,
    )
    yield note(
        "In asynchronous runs, an iteration is the time in which all workers together process"
        " one global batch. Compute, communication and waiting are those of a worker's iteration."
    )


class Choice(NamedTuple):
    condition: str
    ranked: RankedGroup
    fastest: float
    is_approximate: bool

    def phase_seconds(self, phases: Sequence[str]) -> float | None:
        split = iteration_breakdown(self.ranked.group)
        return None if split is None else split.of(phases)


def _choices(one: ConditionRanking) -> Iterator[Choice]:
    fastest = one.ranking.entries[0].mean
    for ranked in one.ranking.entries:
        yield Choice(one.condition, ranked, fastest, is_approximate=False)
    for ranked in one.approximate.entries if one.approximate else ():
        yield Choice(one.condition, ranked, fastest, is_approximate=True)


def _condition_text(one: ConditionRanking) -> str:
    if one.approximate is None:
        text = ranking_headline(one.ranking, one.lead)
    else:
        others = beside_exact(one.approximate, one.approximate_lead, one.ranking.entries[0])
        text = f"{ranking_headline(one.ranking, one.lead, 'exact')} {others}"
    # A difference within noise needs no explanation.
    if one.lead is None or one.lead.is_tie:
        return text
    first, second = one.ranking.entries[:2]
    reason = explain(first.group, second.group)
    has_reason = reason is not None and reason.seconds > 0
    return f"{text} {_capitalize(explanation_text(reason))}" if reason and has_reason else text


def winners_answer(rankings: Sequence[ConditionRanking]) -> str:
    approximate = "; ".join(
        f"{one.condition}: {one.approximate.entries[0].group.label}"
        for one in rankings
        if one.approximate is not None
    )
    tail = _uncertain(rankings)
    if approximate:
        tail += f" Fastest approximate (can change the result): {approximate}."
    if len({one.fastest for one in rankings}) == 1:
        conditions = "; ".join(one.condition for one in rankings)
        fastest = "is the fastest exact choice" if approximate else "is fastest"
        return f"{rankings[0].fastest} {fastest} in every case ({conditions}).{tail}"
    each = _capitalize("; ".join(f"{one.condition}: {one.fastest}" for one in rankings))
    depends = len({one.fastest for one in rankings if one.is_clear}) > 1
    verb = "depends" if depends else "may depend"
    return f"The fastest {verb} on the setup. {each}.{tail}"


def _uncertain(rankings: Sequence[ConditionRanking]) -> str:
    """Conditions whose fastest choice is not significantly faster than the second."""
    leads = [(one.condition, one.lead) for one in rankings if one.lead is not None]
    ties = [condition for condition, lead in leads if lead.is_tie]
    single = [condition for condition, lead in leads if not lead.is_tie and not lead.is_significant]
    text = f" Within noise: {'; '.join(ties)}." if ties else ""
    return text + (f" Single run, significance unknown: {'; '.join(single)}." if single else "")


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


@section("scaling", "Scaling")
def scaling(context: SectionContext) -> Iterator[Block]:
    found = scaling_series(context.groups)
    by_kind = {kind: [series for series in found if series.kind == kind] for kind in KINDS}
    # The intended kind has more series; a few of the other arise where batch sizes coincide.
    for kind, own in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        if own:
            yield Text(f"{kind.capitalize()} scaling: {KIND_TEXTS[kind]}.")
            yield answer(scaling_answer(own))
            yield from _scaling_figures(context, kind, own)
            yield _scaling_table(own)
            items = [(f"{series.name}:", text) for series in own if (text := _change(series))]
            items += [
                (f"{series.name}, {point.workers} workers:", f"{efficiency_text(series, point)}.")
                for series in own
                for point in series.points
                if series.is_superlinear(point)
            ]
            yield BulletList(items)
    if found:
        yield note(
            "Speedup: samples per second over those of the fewest workers. Efficiency: speedup"
            " over the ideal. Communication per epoch is exposed communication. Whiskers:"
            " min–max of the repeats."
        )


def scaling_answer(found: Sequence[ScalingSeries]) -> str:
    """Speedups of the series that have the most workers."""
    most = max(series.points[-1].workers for series in found)
    largest = [(series, last) for series in found if (last := series.points[-1]).workers == most]
    largest.sort(key=lambda one: -one[1].speedup)
    bases = {series.base_workers for series, _ in largest}
    named = largest[:MAX_ANSWERS]
    changes = correct([series.speedup_change(last) for series, last in named], len(largest))
    texts = [
        f"{series.name}{'' if is_exact(last.group) else ' (approximate)'}"
        f" {last.speedup:.2f} times as fast"
        + (f" as with {series.base_workers}" if len(bases) > 1 else "")
        + f" ({speedup_interval(change)}{efficiency_text(series, last)})"
        for (series, last), change in zip(named, changes, strict=True)
    ]
    more = f"; and {len(largest) - MAX_ANSWERS} more" if len(largest) > MAX_ANSWERS else ""
    instead = f" instead of {bases.pop()}" if len(bases) == 1 else ""
    return f"With {most} workers{instead}: {'; '.join(texts)}{more}."


def _change(series: ScalingSeries) -> str:
    """How an iteration changes from the fewest to the most workers; empty without phases."""
    base, last = series.points[0], series.points[-1]
    if base.split is None or last.split is None:
        return ""
    before, after = base.split.of(COMPUTE_PHASES), last.split.of(COMPUTE_PHASES)
    ideal = series.ideal_compute_seconds(before, last)
    little = 0.005 * last.split.total
    parts = [
        f", {name} from {formatting.seconds(first) if first > little else '0'} to"
        f" {formatting.seconds(then) if then > little else '0'}"
        for name, phase in (("communication", "exchange"), ("waiting", "wait"))
        if max(first := base.split.seconds[phase], then := last.split.seconds[phase]) > little
    ]
    return (
        f"from {base.workers} to {last.workers} workers, compute goes from"
        f" {formatting.seconds(before)} to {formatting.seconds(after)} per iteration"
        f" (ideal: {formatting.seconds(ideal)}){''.join(parts)}."
    )


def _scaling_figures(
    context: SectionContext, kind: str, found: Sequence[ScalingSeries]
) -> Iterator[Figure]:
    counts = sorted({point.workers for series in found for point in series.points})
    bases = sorted({series.base_workers for series in found})
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
    for index, series in enumerate(found[:MAX_SERIES]):
        workers = [point.workers for point in series.points]
        ideals = [point.workers / series.base_workers for point in series.points]
        means = [point.speedup for point in series.points]
        lows = [min(point.speedups) for point in series.points]
        highs = [max(point.speedups) for point in series.points]
        speedups.append(Series(series.name, workers, means, lows, highs, index))
        share, low, high = (
            [value / ideal for value, ideal in zip(values, ideals, strict=True)]
            for values in (means, lows, highs)
        )
        efficiencies.append(Series(series.name, workers, share, low, high, index))
    for chart in (
        LineChart(f"Speedup against workers, {kind} scaling", "workers", "speedup", speedups,
                  from_zero=True, x_ticks=counts),
        LineChart(f"Efficiency against workers, {kind} scaling", "workers", "efficiency",
                  efficiencies, y_quantity="share", from_zero=True, x_ticks=counts),
    ):  # fmt: skip
        yield line_figure(context.figure_name("scaling", f"{kind}-{chart.y_label}"), chart)


def _scaling_table(found: Sequence[ScalingSeries]) -> Table:
    return table(
        [(series, point) for series in found for point in series.points],
        Column("strategy", lambda row: row[0].name),
        Column("batch", lambda row: row[0].batch.removeprefix("batch ")),
        Column("workers", lambda row: row[1].workers),
        Column("samples per second", lambda row: row[1].throughputs, lambda value: f"{value:,.0f}"),
        Column("speedup", lambda row: row[1].speedups, lambda value: f"{value:.2f}"),
        Column("efficiency", lambda row: row[0].efficiency(row[1]), formatting.share),
        Column("time per epoch", lambda row: row[1].epoch_seconds, formatting.seconds),
        Column("communication per epoch", lambda row: _exposed(row[1]), formatting.seconds),
        Column("overlapped per epoch", lambda row: _overlapped(row[1]), formatting.seconds),
    )


def _exposed(point: ScalingPoint) -> list[float] | None:
    return point.exchange_seconds_in_epoch if point.has_exposed_communication else None


def _overlapped(point: ScalingPoint) -> list[float] | str:
    if point.workers == 1:
        return "none"
    if len(point.overlapped_seconds_in_epoch) < len(point.epoch_seconds):
        return NOT_MEASURED
    return point.overlapped_seconds_in_epoch


@section("batch_size", "Batch size")
def batch_size(context: SectionContext) -> Iterator[Block]:
    rows = summarize_batch_sizes(context.groups)
    if not rows:
        return
    text = batch_size_answer(rows)
    if text:
        yield answer(text)
    labels = {id(row.group): _batch_label(row) for row in rows}
    yield from bar_figure(
        context.figure_name("batch-size", "time"),
        "Wall time by batch size",
        "wall time",
        mean_bars(
            context,
            [(row.group, row.wall_seconds) for row in rows],
            formatting.seconds,
            lambda group: labels[id(group)],
        ),
        "seconds",
    )
    quality = quality_of(context.groups)
    values = [(row.group, row.group.finals(quality.key)) for row in rows]
    # Bars start at zero, and the loss of a user's model may be negative.
    if all(value >= 0 for _, own in values for value in own):
        yield from bar_figure(
            context.figure_name("batch-size", "accuracy" if quality is ACCURACY else "loss"),
            f"{quality.name.capitalize()} by batch size",
            quality.name,
            mean_bars(context, values, formatting.number, lambda group: labels[id(group)]),
        )
    accuracy: Column[BatchSizeSummary] = Column(
        "test accuracy", lambda row: row.test_accuracy, formatting.number
    )
    yield table(
        rows,
        Column("configuration", lambda row: row.group.label),
        Column("batch", lambda row: row.batch_size, formatting.count),
        Column("time", lambda row: row.wall_seconds, formatting.seconds),
        Column("time per iteration", lambda row: row.iteration_seconds, formatting.seconds),
        Column("time per epoch", lambda row: row.epoch_seconds, formatting.seconds),
        Column("first epoch", lambda row: row.first_epoch_seconds, formatting.seconds),
        Column("test loss", lambda row: row.test_loss, formatting.number),
        *([accuracy] if quality is ACCURACY else []),
        Column("peak memory", lambda row: row.peak_memory_bytes, formatting.size),
        Column("CPU, mean", lambda row: row.cpu_percent, formatting.percent),
    )


def batch_size_answer(rows: Sequence[BatchSizeSummary]) -> str:
    """The largest batch against the smallest; empty if more than the batch differs."""
    small, large = rows[0], rows[-1]
    sizes = [row.batch_size for row in rows]
    if sizes.count(small.batch_size) > 1 or sizes.count(large.batch_size) > 1:
        return ""
    if not differ_in_batch_size_only(small, large):
        return ""
    parts = [
        f"{name} {format_difference(gap, is_brief=True)}"
        for name, gap in compare_batch_sizes(small, large)
    ]
    quality = quality_of((small.group, large.group))
    before, after = (row.group.mean_of(quality.key) for row in (small, large))
    if before is not None and after is not None:
        difference = compare_accuracy(small.group, large.group, quality=quality)
        noise = f" ({accuracy_note(difference)})" if difference.is_chance else ""
        name = "accuracy" if quality is ACCURACY else quality.name
        parts.append(f"{name} {after:.4f} instead of {before:.4f}{noise}")
    is_single = min(len(small.wall_seconds), len(large.wall_seconds)) < 2
    single = " (single run)" if is_single else ""
    return f"Batch {large.batch_size:,} against {small.batch_size:,}{single}: {', '.join(parts)}."


def _batch_label(row: BatchSizeSummary) -> str:
    """The label of the group, with the batch size unless it contains it."""
    label = row.group.label
    has_size = str(row.batch_size) in label.replace(",", "").split()
    return label if has_size else f"batch {row.batch_size:,}: {label}"


@section("checkpoint", "Checkpoint overhead")
def checkpoint(context: SectionContext) -> Iterator[Block]:
    costs = checkpoint_costs(context.groups)
    if not costs:
        return
    pairs = [f"{cost.label} against {cost.baseline}" for cost in costs if cost.baseline]
    if pairs:
        yield answer(checkpoint_answer(costs))
    yield _checkpoint_table(_baselines(context.groups, costs), costs)
    text = (
        f"Compared: {'; '.join(pairs)}."
        if pairs
        else "Not compared: no run differs only in having no checkpoints."
    )
    gaps = [gap for cost in costs for gap in (cost.longer, cost.more_memory) if gap is not None]
    yield note(" ".join(filter(None, (text, interval_note(gaps)))))


def _baselines(groups: Sequence[RunGroup], costs: Sequence[CheckpointCost]) -> list[CheckpointCost]:
    labels = {cost.baseline for cost in costs}
    return [baseline_cost(group) for group in groups if group.label in labels]


def _checkpoint_table(
    baselines: Sequence[CheckpointCost], costs: Sequence[CheckpointCost]
) -> Table:
    return table(
        [*baselines, *costs],
        Column("configuration", lambda cost: cost.label),
        Column("checkpoints", lambda cost: cost.counts or 0, formatting.count),
        Column("bytes", lambda cost: cost.sizes_bytes, formatting.size),
        Column("blocked", _blocked_seconds, formatting.seconds),
        Column("wall time", lambda cost: cost.wall_seconds, formatting.seconds),
        Column("memory, mean", lambda cost: cost.memory_bytes, formatting.size),
        Column("time against none", _longer_text),
        Column("memory against none", _more_memory_text),
    )


def _blocked_seconds(cost: CheckpointCost) -> list[float]:
    """Zero for checkpoints that took no time; empty without checkpoints."""
    return cost.blocked_seconds or ([0.0] if cost.counts else [])


def checkpoint_answer(costs: Sequence[CheckpointCost]) -> str:
    texts = []
    for cost in costs:
        longer, more_memory = _longer_text(cost), _more_memory_text(cost)
        if longer is not None:
            text = (
                f"{cost.label}: {_blocked_text(cost)}; compared with {cost.baseline}: wall time"
                f" {longer}"
            )
            texts.append(f"{text}, memory {more_memory}" if more_memory else text)
    return f"{'. '.join(texts)}."


def _longer_text(cost: CheckpointCost) -> str | None:
    return None if cost.longer is None else format_difference(cost.longer, formatting.seconds)


def _more_memory_text(cost: CheckpointCost) -> str | None:
    more = cost.more_memory
    return None if more is None else format_difference(more, formatting.size, is_brief=True)


def _blocked_text(cost: CheckpointCost) -> str:
    text = f"training blocked for {formatting.seconds(cost.mean_blocked_seconds)}"
    share = cost.blocked_share
    return text if share is None else f"{text} ({formatting.share(share)} of the wall time)"
