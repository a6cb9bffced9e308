"""Time to the target accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline import formatting
from paceline.analysis.run_group import RunGroup
from paceline.report.charts.bars import BarChart, draw_bars
from paceline.report.document import Block, Figure, Table
from paceline.report.sections.outline import SectionContext, known, mean_bar

TITLE = "Time to the target"


@dataclass(frozen=True, slots=True)
class TargetRow:
    label: str
    target: float
    seconds: list[float]
    """Of the runs that reached it."""
    runs: int
    best_accuracy: float | None


def target_rows(cells: Sequence[RunGroup]) -> list[TargetRow]:
    """Of the cells that had a target."""
    rows = []
    for cell in cells:
        if not cell.runs or cell.config.target_accuracy is None:
            continue
        seconds = known(run.seconds_to_target for run in cell.runs)
        accuracies = [
            entry["test_accuracy"]
            for run in cell.runs
            for entry in run.history
            if entry.get("test_accuracy") is not None
        ]
        best = max(accuracies, default=None)
        rows.append(
            TargetRow(cell.label, cell.config.target_accuracy, seconds, len(cell.runs), best)
        )
    return rows


def build(outline: SectionContext) -> list[Block]:
    rows = target_rows(outline.cells)
    if not rows:
        return []
    places = {cell.label: outline.place(cell) for cell in outline.plotted}
    bars = [
        mean_bar(row.label, row.seconds, formatting.seconds, places[row.label])
        for row in rows
        if row.seconds and row.label in places
    ]
    title = "Training time to the target accuracy"
    blocks: list[Block] = []
    if bars:
        chart = BarChart(title, "training time", bars, "seconds")
        blocks.append(Figure(outline.figure("target"), title, draw_bars(chart)))
    columns = ("configuration", "target", "time to target", "reached by", "best accuracy")
    shown = [
        (
            row.label,
            f"{row.target:g}",
            formatting.spread(row.seconds, formatting.seconds) if row.seconds else "not reached",
            f"{len(row.seconds)} of {row.runs}",
            formatting.number(row.best_accuracy),
        )
        for row in rows
    ]
    return [*blocks, Table(columns, shown)]
