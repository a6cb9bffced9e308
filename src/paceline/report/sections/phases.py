"""Where the time goes: phases of an iteration and of the whole run, by cell and by worker."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import formatting
from paceline.analysis.events import IN_ITERATION
from paceline.analysis.phases import (
    COMPUTE_PHASES,
    OUTSIDE,
    Explanation,
    PhaseBreakdown,
    by_rank,
    explain,
    has_first,
    hidden_of_cell,
    iteration_breakdown,
    mean_split,
    run_breakdown,
)
from paceline.analysis.ranking import iteration_pace
from paceline.analysis.run_group import RunGroup
from paceline.report.charts.bars import Bar, BarChart, Part, draw_bars
from paceline.report.document import Block, Figure, Table, Text
from paceline.report.sections.outline import SectionContext
from paceline.report.startup import startup_table

TITLE = "Where the time goes"
MOST_WORKERS = 16
"""Bars in the figure of workers."""
MOST_EXPLAINED = 8
NOT_MEASURED = "not measured"
NOTHING = 0.0005
"""A share that is shown as 0.0%."""


def build(outline: SectionContext) -> list[Block]:
    splits = [
        (cell, split)
        for cell in outline.finished
        if (split := iteration_breakdown(cell)) is not None
    ]
    if not splits:
        return []
    shown = [(cell, split) for cell, split in splits if id(cell) in outline.places]
    blocks: list[Block] = [
        _figure(outline, "step", "One iteration by phase", shown, IN_ITERATION, is_share=False),
        _figure(outline, "share", "One iteration by phase, as shares", shown, IN_ITERATION),
        *_workers(outline),
        *_wholes(outline),
        *startup_table(outline.finished),
        *outline.drawn_note(),
        *_shares(splits),
        _table(splits),
        *_explanations(outline),
    ]
    return blocks


def _shares(splits: Sequence[tuple[RunGroup, PhaseBreakdown]]) -> list[Block]:
    """Computing, exposed communication and waiting in one figure each, and what overlapped."""
    if all(cell.workers == 1 for cell, _ in splits):
        return []
    rows = []
    for cell, split in splits:
        rows.append(
            (
                cell.label,
                formatting.share(split.of(COMPUTE_PHASES) / split.total if split.total else None),
                formatting.share(split.share("exchange")),
                formatting.share(split.share("wait")),
                *overlapped(cell, split),
            )
        )
    columns = ("configuration, of an iteration", "compute", "communication", "waiting",
               "overlapped communication", "overlapped, of all communication")  # fmt: skip
    return [
        Table(columns, rows),
        Text(
            "Communication is exposed communication, which training waits for. Overlapped"
            " communication runs concurrently with the backward pass and is not counted in the"
            f" phases. {NOT_MEASURED.capitalize()}: the records do not say how long it took.",
            "note",
        ),
    ]


def overlapped(cell: RunGroup, split: PhaseBreakdown) -> tuple[str, str]:
    """Overlapped communication of an iteration, and its share of all communication."""
    if cell.workers == 1:
        return "none", "none"
    hidden = hidden_of_cell(cell)
    if hidden is None:
        return NOT_MEASURED, NOT_MEASURED
    communicating = hidden + split.seconds["exchange"]
    return formatting.seconds(hidden), formatting.share(
        hidden / communicating if communicating else 0.0
    )


def first_note(cells: Sequence[RunGroup]) -> list[Text]:
    """What step times and phases exclude, and for which cells the records do not allow that."""
    timed = [cell for cell in cells if cell.timed]
    if not timed:
        return []
    included = [cell.label for cell in timed if has_first(cell)]
    text = "Step times and phases exclude the first iteration (warm-up)."
    if included:
        whose = "all configurations" if len(included) == len(timed) else "; ".join(included)
        text += (
            f" Exception: the phases of {whose} include it, since the records hold them only as"
            " sums over the run."
        )
    return [Text(text, "note")]


def spent(split: PhaseBreakdown | None) -> tuple[str, str, str]:
    """Compute, communication and waiting, as tables have them side by side."""
    if split is None:
        return "-", "-", "-"
    return (
        formatting.seconds(split.of(COMPUTE_PHASES)),
        formatting.seconds(split.seconds["exchange"]),
        formatting.seconds(split.seconds["wait"]),
    )


def _figure(
    outline: SectionContext,
    part: str,
    title: str,
    splits: Sequence[tuple[RunGroup, PhaseBreakdown]],
    phases: Sequence[str],
    *,
    is_share: bool = True,
) -> Figure:
    bars = [bar(cell.label, split, phases, is_share=is_share) for cell, split in splits]
    return _drawn(outline, part, title, bars, is_share=is_share)


def _drawn(
    outline: SectionContext, part: str, title: str, bars: Sequence[Bar], *, is_share: bool = True
) -> Figure:
    used = {
        part.kind
        for bar in bars
        for part in bar.parts
        if part.value > NOTHING * sum(one.value for one in bar.parts)
    }
    kinds = [phase for phase in (*IN_ITERATION, *OUTSIDE) if phase in used]
    chart = BarChart(
        title,
        "share of the time" if is_share else "time per iteration",
        bars,
        "share" if is_share else "seconds",
        kinds,
        1.0 if is_share else None,
    )
    return Figure(outline.figure("phases", part), title, draw_bars(chart))


def bar(label: str, split: PhaseBreakdown, phases: Sequence[str], *, is_share: bool = True) -> Bar:
    """A bar whose parts are the phases; as shares they sum to one."""
    parts = []
    for phase in phases:
        seconds = split.seconds[phase]
        text = f"{formatting.seconds(seconds)}, {formatting.share(split.share(phase))}"
        parts.append(Part(phase, split.share(phase) if is_share else seconds, text))
    return Bar(label, parts, formatting.seconds(split.total))


def _workers(outline: SectionContext) -> list[Block]:
    """Each worker of a cell, on average over the finished runs."""
    bars = []
    for cell in outline.plotted:
        if not cell.finished:
            continue
        each: dict[int, list[PhaseBreakdown]] = {}
        for run in cell.finished:
            for rank, split in by_rank(run).items():
                each.setdefault(rank, []).append(split)
        splits = {rank: mean_split(own) for rank, own in each.items()}
        if len(splits) > 1:
            bars += [
                bar(f"{cell.label}: rank {rank}", split, IN_ITERATION, is_share=False)
                for rank, split in sorted(splits.items())
            ]
    if not bars:
        return []
    title = "One iteration of each worker"
    if len(bars) > MOST_WORKERS:
        title = f"One iteration of each worker, the first {MOST_WORKERS} of {len(bars)}"
    return [_drawn(outline, "workers", title, bars[:MOST_WORKERS], is_share=False)]


def _wholes(outline: SectionContext) -> list[Block]:
    """The whole run, with what is beside training."""
    wholes = [
        (cell, split) for cell in outline.plotted if (split := run_breakdown(cell)) is not None
    ]
    order = (*IN_ITERATION, *OUTSIDE)
    return [_figure(outline, "whole", "The whole run by phase, as shares", wholes, order)]


def _table(splits: Sequence[tuple[RunGroup, PhaseBreakdown]]) -> Table:
    rows = [
        (
            cell.label,
            *(_phase(split, phase) for phase in IN_ITERATION),
            formatting.seconds(split.total),
        )
        for cell, split in splits
    ]
    return Table(("configuration, per iteration", *IN_ITERATION, "all"), rows)


def _phase(split: PhaseBreakdown, phase: str) -> str:
    """What would round to nothing is told as that."""
    share = split.share(phase)
    if share < NOTHING:
        return "-"
    return f"{formatting.seconds(split.seconds[phase])} ({formatting.share(share)})"


def _explanations(outline: SectionContext) -> list[Block]:
    """What each phase adds to the time of the fastest, cell by cell."""
    ranking = [paced.cell for paced in iteration_pace(outline.finished).ranking]
    if len(ranking) < 2:
        return []
    # One unit for all of a column.
    mixed = len({cell.config.global_batch_size for cell in ranking[: MOST_EXPLAINED + 1]}) > 1
    found = [
        one
        for other in ranking[1 : MOST_EXPLAINED + 1]
        if (one := explain(ranking[0], other, by_samples=mixed)) is not None
    ]
    if not found:
        return []
    return [
        Text(f"Time {found[0].work} beyond that of {ranking[0].label}, by phase:"),
        Table(
            ("configuration", "longer by", *IN_ITERATION, "explained"), [_row(one) for one in found]
        ),
    ]


def _row(one: Explanation) -> tuple[str, ...]:
    # Of next to nothing there is no share to tell.
    is_told = abs(one.seconds) > 0.05 * sum(map(abs, one.by_phase.values()))
    explained = one.explained / one.seconds if is_told else None
    return (
        one.slower,
        formatting.seconds(one.seconds),
        *(formatting.seconds(one.by_phase[phase]) for phase in IN_ITERATION),
        formatting.share(explained),
    )
