"""Speedup and efficiency against the number of workers, strong and weak scaling apart."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import formatting
from paceline.analysis.phases import COMPUTE_PHASES
from paceline.analysis.ranking import is_exact
from paceline.analysis.scaling import NEGLIGIBLE, ScalingPoint, ScalingSeries, scaling_series
from paceline.report.charts.lines import LineChart, Series, draw_lines
from paceline.report.document import Block, BulletList, Figure, Table, Text
from paceline.report.sections.outline import SectionContext
from paceline.report.sections.phases import NOT_MEASURED
from paceline.report.wording import efficiency_text

TITLE = "Scaling"
MOST_TOLD = 4

KINDS = {
    "strong": "the global batch stays the same, each worker gets less of it",
    "weak": "each worker's batch stays the same, the global batch grows",
}


def build(outline: SectionContext) -> list[Block]:
    blocks: list[Block] = []
    found = scaling_series(outline.cells)
    by_kind = {kind: [family for family in found if family.kind == kind] for kind in KINDS}
    # What was meant has more families; a few of the other kind come about where batches meet.
    for kind, own in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        if own:
            blocks += [
                Text(f"{kind.capitalize()} scaling: {KINDS[kind]}."),
                Text(answer(own), "answer"),
                *_figures(outline, kind, own),
                _table(own),
                BulletList(
                    [(f"{family.name}:", text) for family in own if (text := _why(family))]
                    + [
                        (f"{family.name}, {point.workers} workers:", f"{flag}.")
                        for family in own
                        for point in family.points
                        if family.is_superlinear(point) and (flag := efficiency_text(family, point))
                    ]
                ),
            ]
    if blocks:
        blocks.append(
            Text(
                "Speedup: samples per second over those of the fewest workers. Efficiency: speedup"
                " over the ideal. Communication per epoch is exposed communication. Whiskers:"
                " min–max of the repeats.",
                "note",
            )
        )
    return blocks


def answer(found: Sequence[ScalingSeries]) -> str:
    """With most workers: how much faster each is than with the fewest."""
    most = max(family.points[-1].workers for family in found)
    reach = [(family, last) for family in found if (last := family.points[-1]).workers == most]
    reach.sort(key=lambda one: -one[1].speedup)
    bases = {family.base_workers for family, _ in reach}
    texts = [
        f"{family.name}{'' if is_exact(last.group) else ' (approximate)'}"
        f" {last.speedup:.2f} times as fast"
        + (f" as with {family.base_workers}" if len(bases) > 1 else "")
        + f" ({efficiency_text(family, last)})"
        for family, last in reach[:MOST_TOLD]
    ]
    more = f"; and {len(reach) - MOST_TOLD} more" if len(reach) > MOST_TOLD else ""
    instead = f" instead of {bases.pop()}" if len(bases) == 1 else ""
    return f"With {most} workers{instead}: {'; '.join(texts)}{more}."


def _why(family: ScalingSeries) -> str:
    """What became of an iteration from the fewest workers to the most; empty without phases."""
    base, last = family.points[0], family.points[-1]
    if base.split is None or last.split is None:
        return ""
    before, after = base.split.of(COMPUTE_PHASES), last.split.of(COMPUTE_PHASES)
    shrunk = family.kind == "strong"
    ideal = before * base.workers / last.workers if shrunk else before
    little = 0.005 * last.split.total
    parts = [
        f"{name} from {formatting.seconds(first) if first > little else 'nothing'} to"
        f" {formatting.seconds(then) if then > little else 'nothing'}"
        for name, phase in (("communication", "exchange"), ("waiting", "wait"))
        if max(first := base.split.seconds[phase], then := last.split.seconds[phase]) > little
    ]
    return (
        f"from {base.workers} to {last.workers} workers, compute goes from"
        f" {formatting.seconds(before)} to {formatting.seconds(after)} per iteration"
        f" (ideal: {formatting.seconds(ideal)}){''.join(f', {part}' for part in parts)}."
    )


def _figures(outline: SectionContext, kind: str, found: Sequence[ScalingSeries]) -> list[Block]:
    counts = sorted({point.workers for family in found for point in family.points})
    bases = sorted({family.base_workers for family in found})
    speedups = [
        Series(
            "ideal" if base == bases[0] else f"ideal from {base} on",
            [count for count in counts if count >= base],
            [count / base for count in counts if count >= base],
            is_guide=True,
        )
        for base in bases
    ]
    efficiencies = [Series("ideal", counts, [1.0] * len(counts), is_guide=True)]
    for place, family in enumerate(found[:8]):
        workers = [point.workers for point in family.points]
        lows = [min(point.speedups) for point in family.points]
        highs = [max(point.speedups) for point in family.points]
        ideals = [count / family.base_workers for count in workers]
        means = [point.speedup for point in family.points]
        speedups.append(Series(family.name, workers, means, lows, highs, place))
        share, low, high = (
            [value / full for value, full in zip(values, ideals, strict=True)]
            for values in (means, lows, highs)
        )
        efficiencies.append(Series(family.name, workers, share, low, high, place))
    charts = (
        LineChart(f"Speedup against workers, {kind} scaling", "workers", "speedup", speedups,
                  from_zero=True, x_ticks=counts),
        LineChart(f"Efficiency against workers, {kind} scaling", "workers", "efficiency",
                  efficiencies, y_quantity="share", from_zero=True, x_ticks=counts),
    )  # fmt: skip
    return [
        Figure(outline.figure("scaling", f"{kind}-{chart.y_label}"), chart.label, draw_lines(chart))
        for chart in charts
    ]


def _overlapped(point: ScalingPoint) -> str:
    if point.workers == 1:
        return "none"
    if len(point.hidden_seconds_in_epoch) < len(point.epoch_seconds):
        return NOT_MEASURED
    return formatting.spread(point.hidden_seconds_in_epoch, formatting.seconds)


def _table(found: Sequence[ScalingSeries]) -> Table:
    rows = [
        (
            family.name,
            family.batch.removeprefix("batch "),
            str(point.workers),
            formatting.spread(point.throughputs, lambda value: f"{value:,.0f}"),
            formatting.spread(point.speedups, lambda value: f"{value:.2f}"),
            formatting.share(family.efficiency(point)),
            formatting.spread(point.epoch_seconds, formatting.seconds),
            formatting.spread(point.exchange_seconds_in_epoch, formatting.seconds)
            if sum(point.exchange_seconds_in_epoch) > NEGLIGIBLE * sum(point.epoch_seconds)
            else "-",
            _overlapped(point),
        )
        for family in found
        for point in family.points
    ]
    columns = ("strategy", "batch", "workers", "samples per second", "speedup", "efficiency",
               "time per epoch", "communication per epoch", "overlapped per epoch")  # fmt: skip
    return Table(columns, rows)
