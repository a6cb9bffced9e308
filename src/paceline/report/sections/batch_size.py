"""What the batch size costs and brings: time, loss, accuracy, memory, CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline import formatting
from paceline.analysis.accuracy import compare_accuracy
from paceline.analysis.phases import epoch_seconds, first_epoch_seconds
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup, differing
from paceline.analysis.statistics import Difference, correct, relative_increase
from paceline.report.charts.bars import BarChart, draw_bars
from paceline.report.document import Block, Figure, Table, Text
from paceline.report.sections.outline import SectionContext, known, mean_bar
from paceline.report.wording import accuracy_note

TITLE = "Batch size"
OF_BATCH = frozenset(
    ("batch_size", "batch_per_worker", "iterations", "epochs", "eval_every", "checkpoint_every")
)
"""Settings that go with the batch: how many iterations make the same number of samples."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Values of each finished run of a cell."""

    cell: RunGroup
    batch: int
    wall_seconds: list[float]
    iteration_seconds: list[float]
    epoch_seconds: list[float]
    first_epoch_seconds: list[float]
    test_loss: list[float]
    test_accuracy: list[float]
    peak_memory_bytes: list[float]
    cpu_percent: list[float]


def batch_rows(cells: Sequence[RunGroup]) -> list[BatchRow]:
    """By batch size; none unless there are at least two sizes."""
    rows = [_row(cell) for cell in cells if cell.finished]
    if len({row.batch for row in rows}) < 2:
        return []
    return sorted(rows, key=lambda row: row.batch)


def _row(cell: RunGroup) -> BatchRow:
    def each(value: Callable[[Run], float | None]) -> list[float]:
        return known(value(run) for run in cell.finished)

    return BatchRow(
        cell,
        cell.config.global_batch_size,
        each(lambda run: run.result["wall_seconds"] if run.result else None),
        cell.iteration_means,
        each(epoch_seconds),
        each(first_epoch_seconds),
        cell.finals("test_loss"),
        cell.finals("test_accuracy"),
        each(lambda run: run.node_sum("rss_bytes_peak")),
        each(lambda run: run.node_sum("cpu_percent_mean")),
    )


def build(outline: SectionContext) -> list[Block]:
    rows = batch_rows(outline.cells)
    if not rows:
        return []
    columns = ("configuration", "batch", "time", "time per iteration", "time per epoch",
               "first epoch", "test loss", "test accuracy",
               "peak memory", "CPU, mean")  # fmt: skip
    shown = [
        (
            row.cell.label,
            formatting.count(row.batch),
            formatting.spread(row.wall_seconds, formatting.seconds),
            formatting.spread(row.iteration_seconds, formatting.seconds),
            formatting.spread(row.epoch_seconds, formatting.seconds),
            formatting.spread(row.first_epoch_seconds, formatting.seconds),
            formatting.spread(row.test_loss, formatting.number),
            formatting.spread(row.test_accuracy, formatting.number),
            formatting.spread(row.peak_memory_bytes, formatting.size),
            formatting.spread(row.cpu_percent, formatting.percent),
        )
        for row in rows
    ]
    told = answer(rows)
    lead = [Text(told, "answer")] if told else []
    return [*lead, *_figures(outline, rows), Table(columns, shown)]


def answer(rows: Sequence[BatchRow]) -> str:
    """The largest batch against the smallest; empty where more than the batch sets them apart."""
    small, large = rows[0], rows[-1]
    sizes = [row.batch for row in rows]
    if sizes.count(small.batch) > 1 or sizes.count(large.batch) > 1:
        return ""
    if set(differing([small.cell.config, large.cell.config])) - OF_BATCH:
        return ""
    compared = [
        (name, relative_increase(after, before))
        for name, before, after in (
            ("wall time", small.wall_seconds, large.wall_seconds),
            ("time per epoch", small.epoch_seconds, large.epoch_seconds),
            ("CPU", small.cpu_percent, large.cpu_percent),
            ("peak memory", small.peak_memory_bytes, large.peak_memory_bytes),
        )
        if before and after and sum(before)
    ]
    gaps = correct([gap for _, gap in compared])
    parts = [
        f"{name} {round(100 * gap.share, 0) or 0.0:+.0f}%{_doubt(gap)}"
        for (name, _), gap in zip(compared, gaps, strict=True)
    ]
    before, after = small.test_accuracy, large.test_accuracy
    if before and after:
        unsure = compare_accuracy(small.cell, large.cell)
        noise = f" ({accuracy_note(unsure)})" if unsure.is_chance else ""
        parts.append(f"accuracy {fmean(after):.4f} instead of {fmean(before):.4f}{noise}")
    is_one = min(len(small.wall_seconds), len(large.wall_seconds)) < 2
    once = " (single run)" if is_one else ""
    return f"Batch {large.batch:,} against {small.batch:,}{once}: {', '.join(parts)}."


def _doubt(found: Difference) -> str:
    return " (within noise)" if found.has_interval and not found.is_significant else ""


def _figures(outline: SectionContext, rows: Sequence[BatchRow]) -> list[Block]:
    drawn = [row for row in rows if id(row.cell) in outline.places]
    figures: list[Block] = []
    for name, title, quantity, values, text in (
        ("time", "Wall time by batch size", "seconds",
         [row.wall_seconds for row in drawn], formatting.seconds),
        ("accuracy", "Test accuracy by batch size", "",
         [row.test_accuracy for row in drawn], formatting.number),
    ):  # fmt: skip
        bars = [
            mean_bar(_name(row), own, text, outline.place(row.cell))
            for row, own in zip(drawn, values, strict=True)
            if own
        ]
        if bars:
            chart = BarChart(title, title.partition(" by")[0].lower(), bars, quantity)
            figures.append(Figure(outline.figure("batch-size", name), title, draw_bars(chart)))
    return figures


def _name(row: BatchRow) -> str:
    """With the batch, where the cell's own name does not say it."""
    label = row.cell.label
    is_said = str(row.batch) in label.replace(",", "").split()
    return label if is_said else f"batch {row.batch:,}: {label}"
