"""Loss and accuracy against iteration, epoch and time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.analysis.curves import Curve, merge_repeats
from paceline.analysis.phases import iterations_in_epoch
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.validation import is_number
from paceline.report.charts.lines import LineChart, Series, draw_lines
from paceline.report.document import Block, Figure, Tabs, Text
from paceline.report.sections.outline import SectionContext, series

TITLE = "Loss and accuracy"

AXES = {
    "iteration": ("iteration", "", "by iteration"),
    "epoch": ("epoch", "", "by epoch"),
    "seconds": ("training time", "seconds", "by time"),
}
"""Key of an evaluation -> name of the axis, its quantity, and the tab's label."""

QUANTITIES = {
    "train_loss": "Training loss",
    "test_loss": "Test loss",
    "test_accuracy": "Test accuracy",
}


@dataclass(frozen=True, slots=True)
class CellCurve:
    label: str
    curve: Curve
    repeats: int


def evaluations(cell: RunGroup, key: str, axis: str) -> CellCurve | None:
    """A test figure of a cell's runs, with the spread of its repeats."""
    curves = [curve for run in cell.shown if len(curve := _evaluations(run, key, axis))]
    if not curves:
        return None
    if axis == "seconds":
        # Repeats take different times to the same iteration: their mean time stands for all.
        aligned = [evaluations(cell, key, "iteration")]
        same = [curve for curve in curves if len(curve) == len(curves[0])]
        if aligned[0] is not None and len(same) == aligned[0].repeats:
            middle = aligned[0].curve
            times = np.mean([curve.x for curve in same], axis=0)
            return CellCurve(
                cell.label, Curve(times, middle.middle, middle.low, middle.high), len(same)
            )
    curve, repeats = merge_repeats(curves)
    return CellCurve(cell.label, curve, repeats)


def _evaluations(run: Run, key: str, axis: str) -> Curve:
    rows = [entry for entry in run.history if is_number(entry.get(key))]
    x = np.array([entry[axis] for entry in rows], dtype=np.float64)
    y = np.array([entry[key] for entry in rows], dtype=np.float64)
    return Curve(x, y, y, y)


def training(cell: RunGroup, axis: str) -> CellCurve | None:
    """The training loss of a cell's runs, as written at each iteration by the first worker."""
    curves = []
    for run in cell.shown:
        if run.timing is None or not len(run.timing.loss):
            continue
        curve = run.timing.loss_by_time if axis == "seconds" else run.timing.loss
        if axis == "epoch":
            per_epoch = iterations_in_epoch(run)
            if per_epoch is None:
                continue
            curve = Curve(curve.x / per_epoch, curve.middle, curve.low, curve.high)
        curves.append(curve)
    if not curves:
        return None
    if axis == "seconds":
        return CellCurve(cell.label, curves[0], 1)
    curve, repeats = merge_repeats(curves)
    return CellCurve(cell.label, curve, repeats)


def build(outline: SectionContext) -> list[Block]:
    blocks: list[Block] = []
    for key, title in QUANTITIES.items():
        figures = []
        for axis in _axes(outline):
            name, quantity, tab = AXES[axis]
            drawn = _series(outline, key, axis)
            # One evaluation of each is a figure of dots: tables tell as much.
            if not drawn or all(len(one.x) < 2 for one in drawn):
                continue
            chart = LineChart(
                label=f"{title} against {name}",
                x_label=name,
                y_label=title.lower(),
                series=drawn,
                x_quantity=quantity,
                y_top=_top(outline, drawn),
            )
            figure = Figure(outline.figure("curves", f"{key}-{axis}".replace("_", "-")),
                            f"{title} against {name}", draw_lines(chart))  # fmt: skip
            figures.append((tab, figure))
        if figures:
            blocks.append(Tabs(outline.figure("tabs", key.replace("_", "-")), figures))
    if not blocks:
        return []
    note = (
        "Shading and whiskers: min–max of the repeats that are as long as the first, and in long"
        " runs of the iterations that share a point. Against time, the training loss is that of the"
        " first repeat. Training time excludes evaluation. Coinciding curves are drawn as"
        " alternating stripes."
    )
    return [*blocks, Text(note, "note"), *outline.drawn_note()]


def _axes(outline: SectionContext) -> list[str]:
    """The most telling first: iterations of different batches do not compare."""
    batches = {cell.config.global_batch_size for cell in outline.plotted if cell.runs}
    return sorted(AXES, key=lambda axis: len(batches) > 1 and axis != "epoch")


def _top(outline: SectionContext, drawn: list[Series]) -> float | None:
    """A run that diverged must not flatten those that learned: its curve leaves the figure."""
    finished = {cell.label for cell in outline.finished}
    usual = [max((*one.y, *one.high)) for one in drawn if one.label in finished]
    most = max(max((*one.y, *one.high)) for one in drawn)
    return 1.1 * max(usual) if usual and most > 3 * max(usual) > 0 else None


def _series(outline: SectionContext, key: str, axis: str) -> list[Series]:
    found = []
    for cell in outline.plotted:
        curve = training(cell, axis) if key == "train_loss" else evaluations(cell, key, axis)
        if curve is not None:
            label = cell.label if cell.finished else f"{cell.label} ({cell.status})"
            found.append(series(label, curve.curve, outline.place(cell)))
    return found
