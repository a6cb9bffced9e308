"""A plan as a page: the recommendation, scaling curves, what limits a step, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline import formatting
from paceline.errors import RecordsError
from paceline.plan.plan import Plan
from paceline.plan.prediction import Interval, Prediction
from paceline.plan.target import Target
from paceline.plan.validation import Check
from paceline.report.charts.axes import WIDTH
from paceline.report.charts.lines import LEFT, RIGHT, LineChart, Series
from paceline.report.document import (
    Block,
    BulletList,
    ChapterPage,
    Code,
    Details,
    Document,
    Figure,
    Section,
    Table,
    Text,
    slug,
)
from paceline.report.html import to_html
from paceline.report.sections.common import line_figure
from paceline.report.wording.plan import (
    batch_advice_texts,
    batch_text,
    by_place,
    condition_notes,
    configuration,
    disturbance_notes,
    effect_cells,
    extrapolation_notes,
    limit_text,
    recommendation_text,
    runner_up_texts,
    step_text,
    validation_texts,
)

TICK_WIDTH = 34.0
"""Room of a number of workers on its axis."""
INTERVAL_NOTE = "Small numbers: the 80% interval."
FIGURE_INTERVAL_NOTE = "Small numbers and vertical bars: the 80% interval."
LIMITS = (
    ("Machine:", "compute times are those of the measured machine and of hosts that are idle"
     " otherwise. Other CPUs or GPUs need their own runs."),
    ("Links:", "hosts are idle otherwise; what many senders at once lose on the way is not"
     " modeled."),
    ("Collectives:", "each is a sequence of rounds with a latency and a bandwidth, fitted to"
     " measurements with two workers, on one host also with more."),
    ("Stragglers:", "workers vary as the measured steps do; a worker that is always slower is"
     " only included as --slowdown."),
    ("Intervals:", "80% of the predictions of bootstrap samples of the measurements, with at least"
     " 3% of compute and 5% of communication added for what differs between runs."),
    ("Candidates:", "strategies that change results, such as local_sgd, are recommended only if"
     " --strategy names them."),
    ("Learning:", "step times say nothing about the loss: compare short runs before a change of"
     " batch size or to a strategy that changes results."),
)  # fmt: skip
"""Of every plan; docs/planning.md has the formulas."""


def write_plan_page(plan: Plan, path: Path) -> None:
    try:
        path.write_text(to_html(plan_document(plan)), encoding="utf-8")
    except OSError as error:
        raise RecordsError(f"cannot write {path}: {error.strerror}") from None


def plan_document(plan: Plan) -> Document:
    known, advice = plan.calibration, plan.advice
    machine = [f"{known.hardware.get('cpu')}, {known.hardware.get('cores')} cores"]
    best = max(plan.predictions, key=lambda each: each.throughput.median)
    headline = f"Fastest: {configuration(best.target)}, {step_text(best.step_seconds)} per step"
    return Document(
        title=f"Plan for {known.model}",
        subtitle=" · ".join(
            [
                f"{len(known.sources)} runs",
                *by_place(plan.predictions),
                *(machine if known.hardware.get("cpu") else []),
            ]
        ),
        about="",
        headline=f"{recommendation_text(advice) if advice else headline}.",
        points=list(_points(plan)),
        next_steps=[],
        chapters=[ChapterPage("plan", "Plan", "", "", list(_sections(plan)))],
        headline_title="Recommendation",
    )


def _points(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.advice is not None:
        yield "Why", limit_text(plan.advice)
        for number, text in enumerate(runner_up_texts(plan.advice)):
            yield ("" if number else "Runners-up"), f"{text}."
        for number, text in enumerate(batch_advice_texts(plan.advice)):
            yield ("" if number else "Batch size"), text
        yield "Command", f"`{plan.advice.command}`"
    if plan.checks:
        yield "How sure", " ".join([*validation_texts(plan.checks), *disturbance_notes(plan)])


def _sections(plan: Plan) -> Iterator[Section]:
    places = by_place(plan.predictions)
    for place, predictions in places.items():
        title = "Scaling" if len(places) == 1 else f"Scaling: {place}"
        yield Section(slug(title), title, list(_scaling(place, predictions)))
    if plan.sensitivity is not None:
        target, effects = plan.sensitivity.target, plan.sensitivity.effects
        is_starred = any(effect.is_extrapolated for effect in effects)
        star_note = " A star marks a batch outside the measured range." if is_starred else ""
        blocks: list[Block] = [
            Text(f"Predicted change of {configuration(target)}, if one thing changes:"),
            Table(
                ("what if", "step time", "samples/s"),
                [effect_cells(effect) for effect in effects],
                is_compact=True,
            ),
            Text(f"{INTERVAL_NOTE}{star_note}", "note"),
        ]
        yield Section("limits", "What limits a step", blocks)
    if plan.checks:
        yield Section("validation", "Predicted and measured", list(_validation(plan.checks)))
    if plan.days:
        yield Section("days", "A day with failures", [_days(plan)])
    yield Section("assumptions", "Assumptions and limits", list(_assumptions(plan)))


def _scaling(place: str, predictions: Sequence[Prediction]) -> Iterator[Block]:
    target = predictions[0].target
    name = slug(place)
    strategies = [
        strategy
        for strategy in dict.fromkeys(each.target.strategy for each in predictions)
        if strategy != "single"
    ]
    counts = sorted({each.target.workers for each in predictions})
    has_figures = len(counts) > 1 and bool(strategies)
    if has_figures:
        series = [_members(strategy, predictions) for strategy in strategies]
        yield _scaling_figure(f"{name}-throughput", "Throughput", series, counts)
        yield _scaling_figure(f"{name}-efficiency", "Efficiency", series, counts)
    rows = [
        (
            each.target.strategy,
            f"{each.target.workers:,}",
            step_text(each.step_seconds, "*" * bool(each.extrapolated)),
            formatting.count(each.throughput.median),
            formatting.percent(100 * each.efficiency.median),
            formatting.percent(100 * each.exposed_communication.median),
            formatting.size(each.link_bytes),
            "-" if each.memory_bytes is None else formatting.size(each.memory_bytes),
        )
        for each in predictions
    ]
    headings = ("strategy", "workers", "step", "samples/s", "efficiency", "exposed", "link bytes",
                "memory")  # fmt: skip
    yield Table(headings, rows)
    intervals = FIGURE_INTERVAL_NOTE if has_figures else INTERVAL_NOTE
    yield Text(
        f"{batch_text(target).capitalize()}, {place}. {intervals} Exposed: share of exposed"
        " communication. Link bytes: through the busiest link in one direction, per step. Memory:"
        " of a worker, without dataset and libraries.",
        "note",
    )
    starred = extrapolation_notes(predictions)
    if starred:
        yield Text("A star and a hollow point mark extrapolated predictions.", "note")
        yield BulletList([("", note.removeprefix("* ")) for note in starred])


def _members(strategy: str, predictions: Sequence[Prediction]) -> list[Prediction]:
    """The curve of a strategy, from one worker if that is predicted."""
    return [each for each in predictions if each.target.strategy in (strategy, "single")]


def _scaling_figure(
    name: str, title: str, series: Sequence[Sequence[Prediction]], counts: Sequence[int]
) -> Figure:
    is_throughput = title == "Throughput"
    lines = []
    for index, members in enumerate(series):
        values = [each.throughput if is_throughput else each.efficiency for each in members]
        lines.append(
            Series(
                members[-1].target.strategy,
                [each.target.workers for each in members],
                *_split(values),
                color_index=index,
                hollow=[at for at, each in enumerate(members) if each.extrapolated],
            )
        )
    ends = [counts[0], counts[-1]]
    if is_throughput:
        # Workers that need not communicate.
        first = series[0][0]
        one = first.throughput.median / first.efficiency.median / first.target.workers
        ideal = Series("ideal", ends, [count * one for count in ends], is_guide=True)
    else:
        ideal = Series("ideal", ends, [1.0, 1.0], is_guide=True)
    return line_figure(
        name,
        LineChart(
            title, "workers", "samples per second" if is_throughput else "efficiency",
            [*lines, ideal], y_quantity="" if is_throughput else "share",
            from_zero=not is_throughput, x_ticks=_spaced(counts), is_x_log=True,
            is_y_log=is_throughput,
        ),
    )  # fmt: skip


def _split(intervals: Sequence[Interval]) -> tuple[list[float], list[float], list[float]]:
    return (
        [each.median for each in intervals],
        [each.low for each in intervals],
        [each.high for each in intervals],
    )


def _spaced(counts: Sequence[int]) -> list[float]:
    """As many numbers of workers as the axis has room to label."""
    span = math.log(counts[-1] / counts[0]) or 1.0
    ticks: list[float] = []
    for count in counts:
        width = (WIDTH - LEFT - RIGHT) * 0.92
        if not ticks or math.log(count / ticks[-1]) / span * width >= TICK_WIDTH:
            ticks.append(count)
    return ticks


def _validation(checks: Sequence[Check]) -> Iterator[Block]:
    yield Text(" ".join(validation_texts(checks)), "answer")
    series = []
    kinds = dict.fromkeys((check.run.strategy, check.is_held_out) for check in checks)
    strategies = list(dict.fromkeys(strategy for strategy, _ in kinds))
    for strategy, is_held_out in kinds:
        same = [
            one for one in checks if (one.run.strategy, one.is_held_out) == (strategy, is_held_out)
        ]
        series.append(
            Series(
                f"{strategy}, held out" if is_held_out else strategy,
                [one.run.step_seconds for one in same],
                *_split([one.predicted for one in same]),
                color_index=strategies.index(strategy),
                has_line=False,
                hollow=() if is_held_out else range(len(same)),
            )
        )
    measured = [one.run.step_seconds for one in checks]
    ends = [0.8 * min(measured), 1.25 * max(measured)]
    guide = Series("predicted = measured", ends, ends, is_guide=True)
    yield line_figure(
        "predicted-measured",
        LineChart(
            "Predicted against measured step time", "measured", "predicted", [*series, guide],
            x_quantity="seconds", y_quantity="seconds", is_x_log=True, is_y_log=True,
        ),
    )  # fmt: skip
    rows = [
        (
            configuration(Target.of(one.run)),
            "yes" if one.is_held_out else "no",
            formatting.short_seconds(one.run.step_seconds),
            step_text(one.predicted),
            f"{100 * one.error:+.0f}%",
        )
        for one in checks
    ]
    yield Table(("run", "held out", "measured", "predicted", "error"), rows, text_columns=2)
    yield Text(
        f"{FIGURE_INTERVAL_NOTE} Runs that the plan was made from are hollow points;"
        " `--against PATH` adds runs that it is not made from.",
        "note",
    )


def _days(plan: Plan) -> Table:
    rows = [
        (
            f"{workers:,}",
            f"{day.failures:.1f}",
            *map(formatting.share, (day.goodput, day.checkpoints, day.lost, day.restarts)),
        )
        for workers, day in plan.days.items()
    ]
    columns = ("workers", "failures", "goodput", "checkpoints", "lost", "restarts")
    return Table(columns, rows)


def _assumptions(plan: Plan) -> Iterator[Block]:
    notes = [*disturbance_notes(plan), *condition_notes(plan)]
    if notes:
        yield BulletList([("", note) for note in notes])
    yield BulletList(LIMITS)
    yield Details("Measurements", [Code("\n".join(plan.calibration.sources))])
