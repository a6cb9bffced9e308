"""What a run learns: time to the target, curves, accuracy, evaluations and sampling order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from paceline import formatting
from paceline.analysis.accuracy import (
    ACCURACY,
    CONVERGENCE_TOLERANCE,
    AccuracySummary,
    common_accuracy,
    compare_accuracy,
    epochs_to_accuracy,
    have_same_dataset,
    summarize_accuracy,
    summarize_target,
)
from paceline.analysis.events import read_evaluations
from paceline.analysis.noise_scale import final_noise_scale, noise_curve
from paceline.analysis.repeats import evaluation_curve, training_loss_curve
from paceline.analysis.run_group import RunGroup
from paceline.analysis.sampling_order import MAX_SAMPLES, SamplingOrder, sampling_order
from paceline.analysis.validation import is_number
from paceline.report.charts.lines import LineChart, Series
from paceline.report.document import Block, Details, Figure, Table, Tabs
from paceline.report.sections.common import (
    Column,
    SectionContext,
    answer,
    bar_figure,
    curve_series,
    line_figure,
    mean_bars,
    note,
    section,
    table,
)
from paceline.report.wording.differences import accuracy_note

AXES = {
    "iteration": ("iteration", "", "by iteration"),
    "epoch": ("epoch", "", "by epoch"),
    "seconds": ("training time", "seconds", "by time"),
}
"""Key of an evaluation -> name of the axis, its quantity, and the label of the tab."""
CURVES = {
    "train_loss": "Training loss",
    "test_loss": "Test loss",
    "test_accuracy": "Test accuracy",
}
MAX_EVALUATIONS = 25
"""Rows per configuration: the first, the last, and evenly spaced ones between them."""
MAX_EPOCHS = 4
"""Epochs per configuration in the table of sampling orders."""


@section("target", "Time to the target")
def target(context: SectionContext) -> Iterator[Block]:
    rows = summarize_target(context.groups)
    if not rows:
        return
    figures = dict.fromkeys(row.target.figure for row in rows)
    yield from bar_figure(
        context.figure_name("target"),
        f"Training time to the target {' or '.join(figures)}",
        "training time",
        mean_bars(context, [(row.group, row.seconds) for row in rows], formatting.seconds),
        "seconds",
    )
    for figure in figures:
        yield table(
            [row for row in rows if row.target.figure == figure],
            Column("configuration", lambda row: row.group.label),
            Column("target", lambda row: f"{row.target.value:g}"),
            Column("time to target", lambda row: row.seconds or "not reached", formatting.seconds),
            Column("reached by", lambda row: f"{len(row.seconds)} of {row.runs}"),
            Column(f"final {figure}", lambda row: row.finals, formatting.number),
            Column(f"best {figure}", lambda row: row.best, formatting.number),
        )


def _curves_title(context: SectionContext) -> str:
    if context.has_accuracy:
        return "Loss and accuracy"
    return "Loss and metrics" if context.metrics else "Loss"


@section("curves", _curves_title)
def curves(context: SectionContext) -> Iterator[Block]:
    has_figures = False
    more = {name: name.replace("_", " ").capitalize() for name in context.metrics}
    for key, title in {**CURVES, **more}.items():
        figures = list(_curve_tabs(context, key, title))
        if figures:
            has_figures = True
            yield Tabs(context.figure_name("tabs", key.replace("_", "-")), figures)
    if has_figures:
        if context.is_one_run:
            yield note(
                "Training time excludes evaluation. Shading: min–max over the iterations of a point"
                " in long runs."
            )
        else:
            yield note(
                "Shading and whiskers: min–max over the repeats that are as long as the first, and"
                " in long runs over the iterations of a point. Against time, the training loss is"
                " that of the first repeat. Training time excludes evaluation. Coinciding curves"
                " are drawn as alternating stripes."
            )
        yield from context.plotted_note()


def _curve_tabs(context: SectionContext, key: str, title: str) -> Iterator[tuple[str, Figure]]:
    for axis in _ordered_axes(context):
        name, quantity, tab = AXES[axis]
        series = _curve_series(context, key, axis)
        # A single evaluation would be a dot; tables show it.
        if all(len(one.x) < 2 for one in series):
            continue
        chart = LineChart(
            label=f"{title} against {name}",
            x_label=name,
            y_label=title.lower(),
            series=series,
            x_quantity=quantity,
            y_top=_y_top(context, series),
        )
        yield (
            tab,
            line_figure(context.figure_name("curves", f"{key}-{axis}".replace("_", "-")), chart),
        )


def _ordered_axes(context: SectionContext) -> list[str]:
    """Epochs first if batch sizes differ, since iterations are not comparable then."""
    batches = {group.batch_size for group in context.plotted if group.runs}
    return sorted(AXES, key=lambda axis: len(batches) > 1 and axis != "epoch")


def _curve_series(context: SectionContext, key: str, axis: str) -> list[Series]:
    found = []
    for group in context.plotted:
        curve = (
            training_loss_curve(group, axis)
            if key == "train_loss"
            else evaluation_curve(group, key, axis)
        )
        if curve is not None:
            label = group.label if group.finished else f"{group.label} ({group.status})"
            found.append(curve_series(label, curve, context.color_index(group)))
    return found


def _y_top(context: SectionContext, series: Sequence[Series]) -> float | None:
    """Limit of the axis if a diverged run would flatten the others; its curve is cut off."""
    finished = {group.label for group in context.finished}
    usual = [max((*one.y, *one.high)) for one in series if one.label in finished]
    most = max(max((*one.y, *one.high)) for one in series)
    return 1.1 * max(usual) if usual and most > 3 * max(usual) > 0 else None


@section("accuracy", lambda context: "Accuracy" if context.has_accuracy else "Test loss")
def accuracy(context: SectionContext) -> Iterator[Block]:
    summaries = summarize_accuracy(context.groups)
    if not summaries:
        return
    yield answer(accuracy_answer(summaries))
    quality, best = summaries[0].quality, summaries[0]
    bars = mean_bars(context, [(one.group, one.finals) for one in summaries], formatting.number)
    # Bars start at zero, and the loss of a user's model may be negative.
    if len(bars) > 1 and all(value >= 0 for one in summaries for value in one.finals):
        yield from bar_figure(
            context.figure_name("accuracy" if quality is ACCURACY else "test-loss"),
            f"Final {quality.name}",
            quality.name,
            bars,
        )
    is_comparable = have_same_dataset(summaries)
    has_accuracy = quality is ACCURACY
    common = common_accuracy(summaries) if has_accuracy else None
    behind: Column[AccuracySummary] = Column(
        "below the best" if has_accuracy else "above the best",
        lambda one: None if one is best else quality.lead(best.final, one.final),
        formatting.number,
    )
    figure = quality.name.removeprefix("test ")
    yield table(
        summaries,
        Column("configuration", lambda one: one.group.label),
        Column(f"final {figure}", lambda one: one.finals, formatting.number),
        *([behind] if is_comparable else []),
        *([Column("test loss", lambda one: one.losses, formatting.number)] if has_accuracy else []),
        Column(f"best {figure}", lambda one: one.best, formatting.number),
        *([_epochs_column(common)] if is_comparable and common is not None else []),
        Column("converged after epoch", lambda one: _epochs_text(one.convergence_epochs, one)),
    )
    text = (
        "Converged: the epoch from which the test loss stays within"
        f" {formatting.share(CONVERGENCE_TOLERANCE)} of its final value, for at least a fifth of"
        " the run."
    )
    if is_comparable and common is not None:
        text = (
            f"Epochs to {common:.2f}: to the first evaluation with this accuracy, which every"
            f" finished run reached. {text}"
        )
    yield note(" ".join([text, *_views_notes([one.group for one in summaries])]))


def _epochs_column(common: float) -> Column[AccuracySummary]:
    return Column(
        f"epochs to {common:.2f}",
        lambda one: _epochs_text(epochs_to_accuracy(one.group, common), one),
    )


def _views_notes(groups: Sequence[RunGroup]) -> Iterator[str]:
    """State which configurations average predictions over several views of a test image."""
    for views in sorted({group.settings.get("eval_views") or 1 for group in groups} - {1}):
        labels = [group.label for group in groups if group.settings.get("eval_views") == views]
        names = "" if len(labels) == len(groups) else f" of {formatting.listed(labels)}"
        yield f"Predictions{names} are averaged over {views} views of each test image."


def _epochs_text(epochs: Sequence[float], summary: AccuracySummary) -> str:
    """With the number of repeats that have a value, unless all or none do."""
    text = formatting.spread(epochs, lambda value: f"{value:.3g}")
    runs = len(summary.group.finished)
    if len(epochs) in (0, runs):
        return text
    count = f"{len(epochs)} of {runs} repeats"
    return f"{text[:-1]}, {count})" if text.endswith(")") else f"{text} ({count})"


def accuracy_answer(summaries: Sequence[AccuracySummary]) -> str:
    quality = summaries[0].quality
    has_accuracy = quality is ACCURACY
    if not have_same_dataset(summaries):
        what = "accuracies" if has_accuracy else "losses"
        return f"Not compared: {what} are of different data."
    if len(summaries) == 1:
        return f"{_single_accuracy(summaries[0])}."
    best, second, last = summaries[0], summaries[1], summaries[-1]
    gap = quality.lead(best.final, second.final)
    difference = compare_accuracy(
        best.group, second.group, quality=quality, comparisons=math.comb(len(summaries), 2)
    )
    noise = accuracy_note(difference)
    suffix = f", {noise}" if noise else ""
    if difference.is_chance:
        text = (
            f"No clear {'accuracy ' * has_accuracy}winner: {quality.name} {best.final:.4f} of"
            f" {best.group.label} and {second.final:.4f} of {second.group.label} are {noise}"
        )
    else:
        praise = "is most accurate" if has_accuracy else "has the lowest loss"
        text = (
            f"{best.group.label} {praise}: {quality.name} {best.final:.4f}; next is"
            f" {second.group.label} with {second.final:.4f}, {gap:.4f}"
            f" {'less' if has_accuracy else 'more'}{suffix}"
        )
    if last is not second:
        worst = "lowest" if has_accuracy else "highest"
        text += f"; {worst} {last.group.label}: {last.final:.4f}"
    return f"{text}."


def _single_accuracy(only: AccuracySummary) -> str:
    text = f"{only.group.label}: {only.quality.name} {only.final:.4f}"
    if not only.can_converge:
        return text
    if not only.convergence_epochs:
        return f"{text}; the test loss had not converged"
    epoch = _epochs_text(only.convergence_epochs, only)
    return f"{text}; the test loss converged after epoch {epoch}"


@section("noise_scale", "Gradient noise scale")
def noise_scale(context: SectionContext) -> Iterator[Block]:
    measured = [
        (group, noise)
        for group in context.groups
        for run in group.shown[:1]
        if (noise := final_noise_scale(run)) is not None and noise.get("batch") is not None
    ]
    if not measured:
        return
    series = [
        curve_series(group.label, curve.as_curve(), context.color_index(group))
        for group, _ in measured
        if context.is_plotted(group) and (curve := noise_curve(group.shown[0])) is not None
    ]
    if any(len(one.x) > 1 for one in series):
        chart = LineChart(
            label="Gradient noise scale against iteration",
            x_label="iteration",
            y_label="noise scale (samples)",
            series=series,
            y_top=_steady_top(series),
        )
        yield line_figure(context.figure_name("noise-scale"), chart)
    yield table(
        measured,
        Column("configuration", lambda row: row[0].label),
        Column("batch size", lambda row: row[1]["batch"], formatting.count),
        Column("noise scale at the end", lambda row: row[1]["value"], formatting.count),
        Column("95% interval", lambda row: _noise_interval(row[1])),
        Column("measured steps", lambda row: row[1]["measurements"], formatting.count),
    )
    yield note(
        "In samples, of the first repeat. Far below the noise scale, doubling the batch halves the"
        " steps to a loss; far above it, the steps hardly change. This rests on assumptions: check"
        " it with short runs at other batch sizes."
    )


def _steady_top(series: Sequence[Series]) -> float:
    """Limit of the axis: the first estimates have intervals that would flatten the rest."""
    return 1.5 * max(max(one.y[len(one.y) // 5 :]) for one in series)


def _noise_interval(noise: dict[str, Any]) -> str | None:
    if noise["low"] is None:
        return None
    high = "" if noise["high"] is None else f"{noise['high']:,.0f}"
    return f"{noise['low']:,.0f}–{high}" if high else f"at least {noise['low']:,.0f}"


@section("evaluations", "Evaluations")
def evaluations(context: SectionContext) -> Iterator[Block]:
    for group in context.plotted:
        run = next(iter(group.shown), None)
        entries = read_evaluations(run.folder.events_file(0)) if run is not None else []
        if entries:
            yield Details(f"{group.label} ({len(entries)})", [_evaluation_table(entries)])


def _evaluation_table(entries: Sequence[dict[str, Any]]) -> Table:
    if len(entries) > MAX_EVALUATIONS:
        step = (len(entries) - 1) / (MAX_EVALUATIONS - 1)
        entries = [entries[round(index * step)] for index in range(MAX_EVALUATIONS)]
    accuracies: Column[dict[str, Any]] = Column(
        "validation accuracy", _accuracy_in, formatting.number
    )
    return table(
        entries,
        Column("epoch", lambda entry: f"{entry['epoch']:.2f}"),
        Column("rank", lambda entry: entry["rank"]),
        Column("validation loss", lambda entry: entry["test_loss"], formatting.number),
        *([accuracies] if any(_accuracy_in(one) is not None for one in entries) else []),
        *(_metric_column(name) for name in _metrics_in(entries[-1]) if name != "accuracy"),
        Column("learning rate", lambda entry: f"{entry['learning_rate']:.3g}"),
        Column("wall time", lambda entry: entry["wall_seconds"], formatting.seconds),
    )


def _metric_column(name: str) -> Column[dict[str, Any]]:
    return Column(
        name.replace("_", " "), lambda entry: _metrics_in(entry).get(name), formatting.number
    )


def _accuracy_in(entry: dict[str, Any]) -> float | None:
    value = entry.get("test_accuracy")
    return value if is_number(value) else None


def _metrics_in(entry: dict[str, Any]) -> dict[str, float]:
    """Events are not validated as results are."""
    metrics = entry.get("metrics")
    items = metrics.items() if isinstance(metrics, dict) else ()
    return {name: value for name, value in items if is_number(value)}


class _Epoch(NamedTuple):
    label: str
    number: int
    samples: Sequence[int]


@section("order", "Sampling order")
def order(context: SectionContext) -> Iterator[Block]:
    if all(group.settings.get("reshuffle") is not False for group in context.finished):
        return
    orders = [one for group in context.finished if (one := sampling_order(group)) is not None]
    if not orders:
        return
    yield answer(f"{'; '.join(map(_order_text, orders))}.")
    yield table(
        [
            _Epoch(one.label, number, samples)
            for one in orders
            for number, samples in enumerate(one.first_samples[:MAX_EPOCHS], 1)
        ],
        Column("configuration", lambda epoch: epoch.label),
        Column("epoch", lambda epoch: epoch.number),
        Column(f"first {MAX_SAMPLES} samples", lambda epoch: ", ".join(map(str, epoch.samples))),
        text_columns=3,
    )


def _order_text(one: SamplingOrder) -> str:
    count = len(one.first_samples)
    epochs = f"{count} epoch{'s' * (count != 1)}"
    if not one.has_all_epochs:
        epochs = f"the first {epochs}"
    if one.distinct == count:
        return f"{one.label}: {epochs}, each in a different order"
    return f"{one.label}: {epochs} in {one.distinct} order{'s' * (one.distinct != 1)}"
