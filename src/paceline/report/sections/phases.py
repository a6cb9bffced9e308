"""Where the time goes: the phases of an iteration, of each rank and of the whole run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline import formatting
from paceline.analysis.phases import (
    WALL_PHASES,
    Explanation,
    PhaseBreakdown,
    explain,
    has_single_bucket,
    iteration_breakdown,
    overlapped_seconds,
    overlapped_share,
    rank_breakdowns,
    run_breakdown,
    startup_seconds,
    worker_breakdown,
)
from paceline.analysis.ranking import rank_by_step_time
from paceline.analysis.run_group import RunGroup, scales_to_samples
from paceline.measure.startup import NEGLIGIBLE_SECONDS
from paceline.report.charts.bars import Bar, BarChart, Part, draw_bars
from paceline.report.document import Block, Figure, Text
from paceline.report.sections.common import (
    Column,
    SectionContext,
    answer,
    note,
    section,
    table,
)
from paceline.report.summary import sampled_text, unrecorded_text
from paceline.report.wording.bottlenecks import NEGLIGIBLE, division

MAX_RANK_BARS = 16
MAX_EXPLAINED = 8
"""Configurations that are compared with the fastest, phase by phase."""
NOT_MEASURED = "not measured"


class GroupPhases(NamedTuple):
    group: RunGroup
    split: PhaseBreakdown


@section("phases", "Where the time goes")
def phases(context: SectionContext) -> Iterator[Block]:
    splits = [
        GroupPhases(group, split)
        for group in context.measured
        if (split := iteration_breakdown(group)) is not None
    ]
    if not splits:
        return
    if any(one.group.workers > 1 for one in splits):
        yield answer(phases_answer(splits))
    shown = [one for one in splits if context.is_plotted(one.group)]
    # Of one run, those of its workers tell more.
    if not context.is_one_run or len(rank_breakdowns(shown[0].group)) < 2:
        yield phase_figure(
            context.figure_name("phases", "step"),
            "One iteration by phase",
            [phase_bar(group.label, split, is_share=False) for group, split in shown],
            is_share=False,
        )
    if not context.is_one_run:
        yield phase_figure(
            context.figure_name("phases", "share"),
            "One iteration by phase, as shares",
            [phase_bar(group.label, split) for group, split in shown],
        )
    yield from _rank_phases(context)
    whole = _whole_bars(context)
    yield phase_figure(
        context.figure_name("phases", "whole"),
        _with_count("The whole run by phase, as shares", whole),
        whole[:MAX_RANK_BARS],
    )
    yield from context.plotted_note()
    if not context.is_one_run:
        yield from _shares(splits)
    has_overlap = context.is_one_run and splits[0].group.workers > 1
    yield table(
        splits,
        Column("configuration, per iteration", lambda one: one.group.label),
        *map(_phase_column, dict.fromkeys(phase for one in splits for phase in one.split.seconds)),
        Column("total", lambda one: one.split.total, formatting.seconds),
        *([Column("overlapped communication", _overlapped, formatting.seconds)] * has_overlap),
    )
    if has_overlap:
        yield from _overlap_notes(splits)
    yield from _explanations(context)
    for group in context.measured:
        for run in group.measured:
            if text := unrecorded_text(run.workers):
                yield note(f"Not recorded, because the ranks were ended: {text}.")
            if text := sampled_text(run.workers):
                yield note(f"{text.capitalize()}.")
    yield from startup_table(context.measured)


def _whole_bars(context: SectionContext) -> list[Bar]:
    """Of one run a bar for each worker, because one that hangs and one that waits differ."""
    if context.is_one_run:
        workers = context.groups[0].runs[0].workers
        return [phase_bar(f"rank {one['rank']}", worker_breakdown(one)) for one in workers]
    return [
        phase_bar(group.label, split)
        for group in context.plotted
        if (split := run_breakdown(group)) is not None
    ]


def phases_answer(splits: Sequence[GroupPhases]) -> str:
    """How an iteration of the fastest and the slowest divides, and who overlaps most."""
    several = [one for one in splits if one.group.workers > 1] or splits
    # Iterations of different batch sizes are different amounts of work.
    sizes = {one.group.batch_size for one in several}
    has_sizes = None not in sizes
    ranked = sorted(
        several, key=lambda one: one.split.total / (one.group.batch_size or 1 if has_sizes else 1)
    )
    if len(splits) == 1:
        return f"An iteration is {_listed(division(splits[0].split))}."
    if len(ranked) == 1:
        return f"An iteration of {ranked[0].group.label} is {_listed(division(ranked[0].split))}."
    fastest, slowest = ranked[0], ranked[-1]
    unit = " per sample" if has_sizes and len(sizes) > 1 else ""
    text = (
        f"An iteration is {_division(fastest.split)} with {fastest.group.label} (the"
        f" fastest{unit}); {_division(slowest.split)} with {slowest.group.label} (the"
        f" slowest{unit})."
    )
    overlapped = [
        (share, one.group.label)
        for one in several
        if not isinstance(share := _overlapped_share(one), str) and share >= NEGLIGIBLE
    ]
    if overlapped:
        share, label = max(overlapped)
        text += (
            f" Most overlapped communication: {label}, {formatting.share(share)} of its"
            " communication runs during the backward pass."
        )
    return text


def _division(split: PhaseBreakdown) -> str:
    parts = (
        ("compute", split.compute_share or 0.0),
        ("exposed communication", split.share("exchange")),
        ("waiting", split.share("wait")),
    )
    return _listed(
        [f"{formatting.share(share)} {name}" for name, share in parts if share >= NEGLIGIBLE]
    )


def _listed(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def phase_bar(label: str, split: PhaseBreakdown, *, is_share: bool = True) -> Bar:
    """A bar with a part per phase; shares add up to one."""
    parts = []
    for phase, seconds in split.seconds.items():
        text = f"{formatting.seconds(seconds)}, {formatting.share(split.share(phase))}"
        parts.append(Part(phase, split.share(phase) if is_share else seconds, text))
    return Bar(label, parts, formatting.seconds(split.total))


def phase_figure(name: str, title: str, bars: Sequence[Bar], *, is_share: bool = True) -> Figure:
    used = {
        part.kind
        for bar in bars
        for part in bar.parts
        if part.value > NEGLIGIBLE * sum(one.value for one in bar.parts)
    }
    chart = BarChart(
        title,
        "share of the time" if is_share else "time per iteration",
        bars,
        "share" if is_share else "seconds",
        [phase for phase in WALL_PHASES if phase in used],
        1.0 if is_share else None,
    )
    return Figure(name, title, draw_bars(chart))


def _rank_phases(context: SectionContext) -> Iterator[Figure]:
    found = [
        (group, splits) for group in context.plotted if len(splits := rank_breakdowns(group)) > 1
    ]
    # The rank comes first, because long labels are cut off.
    bars = [
        phase_bar(
            f"rank {rank}" if len(found) == 1 else f"rank {rank}: {group.label}",
            split,
            is_share=False,
        )
        for group, splits in found
        for rank, split in splits.items()
    ]
    if not bars:
        return
    title = _with_count("One iteration of each worker", bars)
    name = context.figure_name("phases", "workers")
    yield phase_figure(name, title, bars[:MAX_RANK_BARS], is_share=False)


def _with_count(title: str, bars: Sequence[Bar]) -> str:
    """The title of a figure, which may not have all bars."""
    shown = f", the first {MAX_RANK_BARS} of {len(bars)}" if len(bars) > MAX_RANK_BARS else ""
    return f"{title}{shown}"


def startup_table(groups: Sequence[RunGroup]) -> Iterator[Block]:
    """What workers did before their first iteration."""
    rows = [
        (group.label, spent)
        for group in groups
        if (spent := startup_seconds(group)) is not None
        and any(seconds >= NEGLIGIBLE_SECONDS for seconds in spent.values())
    ]
    # Without a GPU, finding the device and choosing the precision take microseconds.
    known = dict.fromkeys(part for _, spent in rows for part in spent)
    parts = [
        part
        for part in known
        if part not in ("device", "precision")
        or any(spent.get(part, 0.0) >= NEGLIGIBLE_SECONDS for _, spent in rows)
    ]
    if rows:
        yield table(
            rows,
            Column("configuration, before the first iteration", lambda row: row[0]),
            *map(_startup_column, parts),
        )
        yield note(
            "Start-up of a worker, mean over workers. Imports and launch end before the"
            " clock starts; the rest is `start-up` of the whole run, and part of `other` in the"
            " records."
        )


def _startup_column(part: str) -> Column[tuple[str, dict[str, float]]]:
    return Column(part, lambda row: row[1].get(part) or None, formatting.seconds)


def _shares(splits: Sequence[GroupPhases]) -> Iterator[Block]:
    """Compute, exposed communication and waiting, with overlapped communication."""
    if all(one.group.workers == 1 for one in splits):
        return
    yield table(
        splits,
        Column("configuration, of an iteration", lambda one: one.group.label),
        Column("compute", lambda one: one.split.compute_share, formatting.share),
        Column("communication", lambda one: one.split.share("exchange"), formatting.share),
        Column("waiting", lambda one: one.split.share("wait"), formatting.share),
        Column("overlapped communication", _overlapped, formatting.seconds),
        Column("overlapped share", _overlapped_share, formatting.share),
    )
    yield note(
        "Compute includes input. Communication is exposed communication, which training waits for."
    )
    yield from _overlap_notes(splits)


def _overlap_notes(splits: Sequence[GroupPhases]) -> Iterator[Block]:
    text = (
        "Overlapped communication runs concurrently with the backward pass and is not counted in"
        " the phases."
    )
    if any(_overlapped(one) == NOT_MEASURED for one in splits):
        text += f" {NOT_MEASURED.capitalize()}: the records do not say how long it took."
    yield note(text)
    single = [
        one.group.label
        for one in splits
        if has_single_bucket(one.group) and _overlapped_share(one) == 0
    ]
    if single:
        yield note(
            f"Nothing overlaps with {'; '.join(single)}: all gradients fit into one bucket, whose"
            " all-reduce starts when the backward pass ends. A smaller `-o bucket_mib` makes more"
            " buckets."
        )


def _overlapped(one: GroupPhases) -> float | str:
    """Seconds per iteration."""
    if one.group.workers == 1:
        return "none"
    overlapped = overlapped_seconds(one.group)
    return NOT_MEASURED if overlapped is None else overlapped


def _overlapped_share(one: GroupPhases) -> float | str:
    overlapped = _overlapped(one)
    if isinstance(overlapped, str):
        return overlapped
    return overlapped_share(overlapped, one.split)


def _phase_column(phase: str) -> Column[GroupPhases]:
    def text(one: GroupPhases) -> str | None:
        share = one.split.share(phase)
        if share < NEGLIGIBLE:
            return None
        return f"{formatting.seconds(one.split.seconds[phase])} ({formatting.share(share)})"

    return Column(phase, text)


def _explanations(context: SectionContext) -> Iterator[Block]:
    """What each phase adds to the time of the fastest configuration."""
    ranking = [ranked.group for ranked in rank_by_step_time(context.finished).entries]
    if len(ranking) < 2:
        return
    # One unit for the whole column.
    by_samples = scales_to_samples(ranking[: MAX_EXPLAINED + 1]) is not None
    found = [
        one
        for other in ranking[1 : MAX_EXPLAINED + 1]
        if (one := explain(ranking[0], other, by_samples=by_samples)) is not None
    ]
    if not found:
        return
    yield Text(f"Extra time {found[0].work} compared with {ranking[0].label}, by phase:")
    yield table(
        found,
        Column("configuration", lambda one: one.slower),
        Column("longer by", lambda one: one.seconds, formatting.seconds),
        *map(_explained_column, dict.fromkeys(phase for one in found for phase in one.by_phase)),
        Column("explained", lambda one: one.explained_share, formatting.share),
    )


def _explained_column(phase: str) -> Column[Explanation]:
    return Column(phase, lambda one: one.by_phase.get(phase), formatting.seconds)
