"""The time of iterations, of each rank, and of one traced iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline import formatting
from paceline.analysis.phases import (
    COMPUTE_PHASES,
    has_first,
    rank_splits,
)
from paceline.analysis.ranks import (
    RankWork,
    compare_first_rank,
    compute_balances,
    mean_rank_work,
    rank_times,
)
from paceline.analysis.repeats import outlier_limit, step_time_curve, summarize_step_times
from paceline.analysis.run_group import RunGroup
from paceline.analysis.trace import TracedStep, TraceSpan, traced_steps
from paceline.report.charts.bars import BarChart, draw_bars
from paceline.report.charts.lines import LineChart
from paceline.report.charts.timeline import Lane, Span, Step, draw_timeline
from paceline.report.document import Block, BulletList, Figure, Table, Text
from paceline.report.sections.common import (
    Column,
    SectionContext,
    curve_series,
    line_figure,
    mean_bars,
    note,
    section,
    table,
)

MAX_RANK_ROWS = 80
NOTABLE = 0.05
"""A difference between ranks that is worth reporting, as a share of an iteration."""

NOTABLE_EXCESS = 0.005
"""Rounding of recorded times is less."""


@section("iteration_time", "Time per iteration")
def iteration_time(context: SectionContext) -> Iterator[Block]:
    curves = [
        (group, curve) for group in context.plotted if (curve := step_time_curve(group)) is not None
    ]
    if curves:
        chart = LineChart(
            label="Time per iteration against iteration",
            x_label="iteration",
            y_label="time per iteration",
            series=[
                curve_series(group.label, curve, context.color_index(group))
                for group, curve in curves
            ],
            y_quantity="seconds",
            from_zero=True,
            y_top=outlier_limit([curve for _, curve in curves]),
        )
        yield line_figure(context.figure_name("iteration-time", "curve"), chart)
    times = [
        (group, summary)
        for group in context.groups
        if (summary := summarize_step_times(group)) is not None
    ]
    bars = mean_bars(
        context, [(group, summary.means) for group, summary in times], formatting.seconds
    )
    if bars and not context.is_one_run:
        label = "Mean time per iteration of each configuration"
        yield Figure(
            context.figure_name("iteration-time", "means"),
            "Mean time per iteration",
            draw_bars(BarChart(label, "time per iteration", bars, "seconds")),
        )
    if curves or times:
        yield from context.plotted_note()
    if times:
        yield table(
            [summary for _, summary in times],
            Column("configuration", lambda one: one.label),
            Column("runs", lambda one: len(one.means), formatting.count),
            Column("mean", lambda one: one.means, formatting.seconds, has_interval=True),
            Column("median", lambda one: one.medians, formatting.seconds),
            Column("95th percentile", lambda one: one.p95s, formatting.seconds),
            Column("first", lambda one: one.firsts, formatting.seconds),
        )
        text = (
            "Mean, median and 95th percentile are computed for each worker without its first"
            " iteration, and averaged over the workers, as is the first iteration."
        )
        if not context.is_one_run:
            text += (
                " For asynchronous runs, the mean is the time in which all workers together process"
                " as many samples as one iteration has. ±: 95% confidence interval of the mean over"
                " the repeats. In parentheses and as whiskers: min–max of the repeats."
            )
        yield note(text)


def first_iteration_note(groups: Sequence[RunGroup]) -> Iterator[Text]:
    """What step times and phases exclude, and for which groups the records do not allow that."""
    timed = [group for group in groups if group.timed]
    if not timed:
        return
    included = [group.label for group in timed if has_first(group)]
    which = "the first iteration (warm-up)"
    if all(map(_begins_late, timed)):
        which = "the first step that --steps selects"
    text = f"Step times and phases exclude {which}."
    if included:
        whose = "all configurations" if len(included) == len(timed) else "; ".join(included)
        text += (
            f" Exception: the phases of {whose} include it, since the records hold them only as"
            " sums over the run."
        )
    if any(map(_has_phases_between_steps, timed)):
        text += (
            " Phases include input and communication between an evaluation or a checkpoint and the"
            " next step, which step times exclude: phases add up to more than the step time."
        )
    yield note(text)


def _has_phases_between_steps(group: RunGroup) -> bool:
    """Such as an all-reduce of the accuracy after an evaluation, which only scripts have."""
    splits = [one for run in group.measured for one in rank_splits(run).values()]
    return group.settings.kind == "profile" and any(
        one.seconds is not None and one.split.total > one.seconds * (1 + NOTABLE_EXCESS)
        for one in splits
    )


def _begins_late(group: RunGroup) -> bool:
    """Whether the measurement of a script began after its first step, so there is no warm-up."""
    first = str(group.settings.values.get("steps", "")).partition(":")[0]
    return group.settings.kind == "profile" and first.strip("0") != ""


class RankRow(NamedTuple):
    group: RunGroup
    work: RankWork
    group_samples: int


@section("ranks", "Time and work of each worker")
def ranks(context: SectionContext) -> Iterator[Block]:
    found = [
        (group, work) for group in context.groups if group.timed and (work := mean_rank_work(group))
    ]
    several = [(group, work) for group, work in found if len(work) > 1]
    if not several:
        return
    yield table(
        found,
        Column("configuration, time per iteration", lambda row: row[0].label),
        Column("rank 0", lambda row: rank_times(row[0]).rank_0, formatting.seconds),
        Column("other ranks", lambda row: rank_times(row[0]).others, formatting.seconds),
        Column(
            "compute balance",
            lambda row: compute_balances(row[0]) if len(row[1]) > 1 else None,
            formatting.share,
        ),
    )
    yield BulletList(list(_first_rank_items(several, has_labels=not context.is_one_run)))
    rows = [
        RankRow(group, one, sum(each.samples for each in work))
        for group, work in several
        for one in work
    ]
    yield _rank_table(rows[:MAX_RANK_ROWS])
    if len(rows) > MAX_RANK_ROWS:
        yield note(f"The first {MAX_RANK_ROWS} of {len(rows):,} workers.")
    yield note(
        "Compute (with input), communication and waiting: phases of an iteration. Balance: mean"
        " compute time over that of the worker that computes longest."
        + ("" if context.is_one_run else " Values are means over the finished repeats.")
    )


def _rank_table(rows: Sequence[RankRow]) -> Table:
    return table(
        rows,
        Column("configuration, worker", _rank_label),
        Column("time per iteration", lambda row: row.work.mean_seconds, formatting.seconds),
        Column("compute", lambda row: row.work.split.of(COMPUTE_PHASES), formatting.seconds),
        Column("communication", lambda row: row.work.split.seconds["exchange"], formatting.seconds),
        Column("waiting", lambda row: row.work.split.seconds["wait"], formatting.seconds),
        Column("training time", lambda row: row.work.training_seconds, formatting.seconds),
        Column("samples", lambda row: row.work.samples, formatting.count),
        Column(
            "share of samples",
            lambda row: row.work.samples / row.group_samples if row.group_samples else None,
            formatting.share,
        ),
        Column(
            "sent and received per iteration", lambda row: row.work.moved_bytes, formatting.size
        ),
    )


def _rank_label(row: RankRow) -> str:
    node = f", node {row.work.node}" if row.group.settings.nnodes > 1 else ""
    return f"{row.group.label}: rank {row.work.rank}{node}"


def _first_rank_items(
    several: Sequence[tuple[RunGroup, Sequence[RankWork]]], *, has_labels: bool
) -> Iterator[tuple[str, str]]:
    """How rank 0 differs, per group; groups in which it does not share one item."""
    alike = []
    for group, work in several:
        if work[0].rank:
            continue  # Rank 0 was not timed.
        text = _first_rank_text(work)
        if text:
            yield f"{group.label}:" if has_labels else "", text
        else:
            alike.append(group.label)
    if alike:
        yield (
            "Rank 0 is like the others:",
            f"no phase differs by more than {formatting.share(NOTABLE)} of an iteration"
            f"{' in ' + '; '.join(alike) if has_labels else ''}.",
        )


def _first_rank_text(work: Sequence[RankWork]) -> str:
    """Empty if rank 0 does not differ notably."""
    found = compare_first_rank(work)
    parts = [
        f"{formatting.seconds(abs(seconds))} {'more' if seconds > 0 else 'less'} in {phase}"
        for phase, seconds in sorted(found.longer_by_phase.items(), key=lambda item: -abs(item[1]))
        if abs(seconds) > NOTABLE * found.iteration_seconds
    ][:3]
    moved, by_others = found.moved_bytes, found.others_moved_bytes
    if max(moved, by_others) > (1 + NOTABLE) * min(moved, by_others):
        sizes = f"{formatting.size(moved)}, each of the others {formatting.size(by_others)}"
        if not parts:
            return (
                f"rank 0 sends and receives {sizes} per iteration; the others wait for the same"
                f" transfers, so no phase differs by more than {formatting.share(NOTABLE)} of an"
                " iteration."
            )
        parts.append(f"and sends and receives {sizes}")
    if not parts:
        return ""
    whole = formatting.seconds(found.iteration_seconds)
    return f"rank 0 spends {', '.join(parts)} (iteration: {whole})."


@section("timeline", "Timeline of one iteration")
def timeline(context: SectionContext) -> Iterator[Block]:
    steps = [
        _timeline_step("" if context.is_one_run else f"{group.label}: ", traced)
        for group in context.plotted
        for traced in traced_steps(group)
    ]
    if not steps:
        return
    title = "One iteration: phases, and transfers below them"
    yield Figure(context.figure_name("timeline"), title, draw_timeline(title, steps), is_wide=True)
    yield note(
        "The first and the last rank, in the first rank's iteration of median length. A transfer"
        " below backward is overlapped communication; one below exchange is exposed."
    )


def _timeline_step(label: str, traced: TracedStep) -> Step:
    lanes = [Lane("phases", _timeline_spans(traced.phases))]
    text = formatting.seconds(traced.seconds)
    if traced.transfers:
        lanes.append(Lane("transfers", _timeline_spans(traced.transfers)))
        text += (
            f", transfers in flight {formatting.seconds(traced.transfer_seconds)},"
            f" {100 * traced.overlapped_share:.0f}% of that overlapped"
        )
    return Step(f"{label}rank {traced.rank}, iteration {traced.iteration}", text, lanes)


def _timeline_spans(spans: Sequence[TraceSpan]) -> list[Span]:
    return [
        Span(
            span.kind,
            span.begin_seconds,
            span.end_seconds,
            "" if span.bytes is None else formatting.size(span.bytes),
        )
        for span in spans
    ]
