"""Time per iteration: against the iteration, and as one figure for each cell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline import formatting
from paceline.analysis.curves import Curve, merge_repeats
from paceline.analysis.run_group import RunGroup
from paceline.report.charts.bars import BarChart, draw_bars
from paceline.report.charts.lines import LineChart, draw_lines
from paceline.report.document import Block, Figure, Table, Text
from paceline.report.sections.outline import SectionContext, mean_bar, series

TITLE = "Time per iteration"


@dataclass(frozen=True, slots=True)
class CellTime:
    """Seconds per iteration of a cell; all but `firsts` leave the first iteration out."""

    label: str
    means: list[float]
    """Of each finished run, the mean over its workers (asynchronous runs: see `Run`); so are
    medians and p95s."""
    medians: list[float]
    p95s: list[float]
    firsts: list[float]
    """Of the slowest worker of each run."""


def cell_time(cell: RunGroup) -> CellTime | None:
    timings = [run.timing for run in cell.timed if run.timing is not None]
    if not timings:
        return None
    return CellTime(
        cell.label,
        cell.iteration_means,
        [timing.median for timing in timings],
        [timing.p95 for timing in timings],
        [max(rank.first for rank in timing.ranks) for timing in timings],
    )


def curve_of(cell: RunGroup) -> Curve | None:
    """Seconds against the iteration, over the repeats; the first iteration is left out."""
    curves = [run.timing.seconds for run in cell.shown if run.timing is not None]
    curves = [curve for curve in curves if len(curve)]
    return merge_repeats(curves)[0] if curves else None


def build(outline: SectionContext) -> list[Block]:
    curves = [(cell, curve_of(cell)) for cell in outline.plotted]
    drawn = [
        series(cell.label, curve, outline.place(cell))
        for cell, curve in curves
        if curve is not None
    ]
    times = [(cell, time) for cell in outline.cells if (time := cell_time(cell)) is not None]
    if not drawn and not times:
        return []
    chart = LineChart(
        label="Time per iteration against iteration",
        x_label="iteration",
        y_label="time per iteration",
        series=drawn,
        y_quantity="seconds",
        from_zero=True,
        y_top=_cut(curves),
    )
    blocks: list[Block] = []
    if drawn:
        name = outline.figure("iteration-time", "curve")
        blocks.append(Figure(name, chart.label, draw_lines(chart)))
    shown = [(cell, time) for cell, time in times if id(cell) in outline.places]
    if shown:
        blocks.append(_bars(outline, shown))
    blocks += outline.drawn_note()
    if times:
        blocks.append(_table([time for _, time in times]))
        blocks.append(
            Text(
                "Mean, median and 95th percentile are computed for each worker without its first"
                " iteration, and averaged over the workers. First: the first iteration of the"
                " slowest worker. For asynchronous runs, the mean is the time in which all workers"
                " together process as many samples as one iteration has. In parentheses and as"
                " whiskers: min–max of the repeats.",
                "note",
            )
        )
    return blocks


def _cut(curves: list[tuple[RunGroup, Curve | None]]) -> float | None:
    """An axis that shows nearly all points: a few slow iterations must not flatten the rest."""
    values = [curve.high for _, curve in curves if curve is not None and len(curve)]
    if not values:
        return None
    # The slowest cell's, however few its iterations: none may lie above the picture.
    usual = max(float(np.quantile(each, 0.98)) for each in values)
    most = max(float(each.max()) for each in values)
    return usual * 1.6 if most > 4 * usual else None


def _bars(outline: SectionContext, times: list[tuple[RunGroup, CellTime]]) -> Figure:
    bars = [
        mean_bar(time.label, time.means, formatting.seconds, outline.place(cell))
        for cell, time in times
    ]
    chart = BarChart(
        "Mean time per iteration of each configuration", "time per iteration", bars, "seconds"
    )
    return Figure(outline.figure("iteration-time", "means"), "Mean time per iteration",
                  draw_bars(chart))  # fmt: skip


def _table(times: list[CellTime]) -> Table:
    rows = [
        (
            time.label,
            formatting.count(len(time.means)),
            formatting.spread(time.means, formatting.seconds),
            formatting.spread(time.medians, formatting.seconds),
            formatting.spread(time.p95s, formatting.seconds),
            formatting.spread(time.firsts, formatting.seconds),
        )
        for time in times
    ]
    return Table(("configuration", "runs", "mean", "median", "95th percentile", "first"), rows)
