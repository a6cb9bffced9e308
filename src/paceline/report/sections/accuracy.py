"""What was learned: accuracy at the end, and how many epochs it took to get there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline import formatting
from paceline.analysis.accuracy import compare_accuracy
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.validation import is_number
from paceline.report.charts.bars import BarChart, draw_bars
from paceline.report.document import Block, Figure, Table, Text
from paceline.report.sections.outline import SectionContext, known, mean_bar
from paceline.report.wording import accuracy_note

TITLE = "Accuracy"
SETTLED = 0.02
"""A test loss has settled when it stays this close to where it ended, as a share of that ..."""
SETTLED_EPOCHS = 0.2
"""... for this share of the epochs at least: the last but one is always near the last."""
FEWEST_EVALUATIONS = 6
"""Fewer do not tell whether a loss still moves."""


@dataclass(frozen=True, slots=True)
class AccuracySummary:
    """Values of each finished run of a cell."""

    cell: RunGroup
    accuracies: list[float]
    """At the end."""
    losses: list[float]
    bests: list[float]
    """The best accuracy of any evaluation."""
    settled_epochs: list[float]
    """From which on the test loss moved no more, of the runs in which it settled."""

    @property
    def best(self) -> float:
        return max(self.bests)

    @property
    def accuracy(self) -> float:
        return math.fsum(self.accuracies) / len(self.accuracies)


def learned(cells: Sequence[RunGroup]) -> list[AccuracySummary]:
    """Of the cells that were evaluated, the best first."""
    found = []
    for cell in cells:
        accuracies = cell.finals("test_accuracy")
        if accuracies:
            found.append(
                AccuracySummary(
                    cell,
                    accuracies,
                    cell.finals("test_loss"),
                    known(map(_best, cell.finished)),
                    known(map(convergence_epoch, cell.finished)),
                )
            )
    return sorted(found, key=lambda one: -one.accuracy)


def _curve(run: Run, key: str) -> list[tuple[float, float]]:
    return [(one["epoch"], one[key]) for one in run.history if is_number(one.get(key))]


def _best(run: Run) -> float | None:
    final = run.final("test_accuracy")
    seen = [value for _, value in _curve(run, "test_accuracy")]
    return max([*seen, *known([final])], default=None)


def convergence_epoch(run: Run) -> float | None:
    """None where it still moved at the end, or there are too few evaluations to tell."""
    curve = _curve(run, "test_loss")
    if len(curve) < FEWEST_EVALUATIONS:
        return None
    last, end = curve[-1]
    epoch = last
    for at, loss in reversed(curve):
        if abs(loss - end) > SETTLED * end:
            break
        epoch = at
    return epoch if last - epoch >= SETTLED_EPOCHS * last else None


def common_accuracy(found: Sequence[AccuracySummary]) -> float:
    """What every finished run reached at some time, rounded down."""
    return math.floor(100 * min(best for one in found for best in one.bests)) / 100


def epochs_to(cell: RunGroup, accuracy: float) -> list[float]:
    """Of each finished run, to the first evaluation that is as good."""
    firsts = (
        next((epoch for epoch, value in _curve(run, "test_accuracy") if value >= accuracy), None)
        for run in cell.finished
    )
    return known(firsts)


def build(outline: SectionContext) -> list[Block]:
    found = learned(outline.cells)
    if not found:
        return []
    common, best = common_accuracy(found), found[0]
    columns: dict[str, Callable[[AccuracySummary], str]] = {
        "accuracy at the end": lambda one: formatting.spread(one.accuracies, formatting.number),
        "below the best": lambda one: (
            "-" if one is best else formatting.number(best.accuracy - one.accuracy)
        ),
        "test loss": lambda one: formatting.spread(one.losses, formatting.number),
        "best accuracy": lambda one: formatting.number(one.best),
        f"epochs to {common:.2f}": lambda one: _of_repeats(epochs_to(one.cell, common), one),
        "settled after epoch": lambda one: _of_repeats(one.settled_epochs, one),
    }
    note = (
        "Settled: the epoch from which on, and for a fifth of the run at least, the test loss"
        f" stayed within {formatting.share(SETTLED)} of where it ended."
    )
    if have_same_data(found):
        note = (
            f"Epochs to {common:.2f}: to the first evaluation with the accuracy that all finished"
            f" runs reached. {note}"
        )
    else:
        del columns["below the best"], columns[f"epochs to {common:.2f}"]
    rows = [(one.cell.label, *(text(one) for text in columns.values())) for one in found]
    return [
        Text(answer(found), "answer"),
        *_figure(outline, found),
        Table(("configuration", *columns), rows),
        Text(note, "note"),
    ]


def _of_repeats(epochs: Sequence[float], one: AccuracySummary) -> str:
    """With how many repeats have such an epoch, where not all of them have."""
    text = formatting.spread(epochs, lambda value: f"{value:.3g}")
    runs = len(one.cell.finished)
    if len(epochs) in (0, runs):
        return text
    count = f"{len(epochs)} of {runs} repeats"
    return f"{text[:-1]}, {count})" if text.endswith(")") else f"{text} ({count})"


def have_same_data(found: Sequence[AccuracySummary]) -> bool:
    """Else there is nothing to compare."""
    return len({one.cell.config.data for one in found}) == 1


def answer(found: Sequence[AccuracySummary]) -> str:
    best = found[0]
    if not have_same_data(found):
        return "Not compared: accuracies are of different data."
    if len(found) == 1:
        text = f"{best.cell.label}: test accuracy {best.accuracy:.4f}"
        runs = best.cell.finished
        if any(len(_curve(run, "test_loss")) < FEWEST_EVALUATIONS for run in runs):
            return f"{text}."
        if not best.settled_epochs:
            return f"{text}; the test loss was still moving at the end."
        settled = (
            f"{text}; the test loss settled after epoch {_of_repeats(best.settled_epochs, best)}"
        )
        return f"{settled}."
    second, last = found[1], found[-1]
    gap = best.accuracy - second.accuracy
    unsure = compare_accuracy(best.cell, second.cell, comparisons=math.comb(len(found), 2))
    note = accuracy_note(unsure)
    if unsure.is_chance:
        text = (
            f"No clear accuracy winner: test accuracy {best.accuracy:.4f} of {best.cell.label}"
            f" and {second.accuracy:.4f} of {second.cell.label} are {note}"
        )
    else:
        text = (
            f"{best.cell.label} is most accurate: test accuracy {best.accuracy:.4f}; next is"
            f" {second.cell.label} with {second.accuracy:.4f}, {gap:.4f} less{note and f', {note}'}"
        )
    if last is not second:
        text += f"; lowest {last.cell.label}: {last.accuracy:.4f}"
    return f"{text}."


def _figure(outline: SectionContext, found: Sequence[AccuracySummary]) -> list[Block]:
    drawn = [one for one in found if id(one.cell) in outline.places]
    if len(drawn) < 2:
        return []
    bars = [
        mean_bar(one.cell.label, one.accuracies, formatting.number, outline.place(one.cell))
        for one in drawn
    ]
    title = "Test accuracy at the end"
    chart = BarChart(title, "test accuracy", bars, "")
    return [Figure(outline.figure("accuracy"), title, draw_bars(chart))]
