"""Timelines of iterations: phases, and transfers below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline import formatting
from paceline.report.charts import svg
from paceline.report.charts.axes import Box, Scale, clip, legend, unit_for, x_axis
from paceline.report.charts.bars import KIND_COLORS

WIDE = 980.0
LANE = 17.0
GAP = 4.0
LEFT, RIGHT = 96.0, 14.0
MAX_SPANS = 500
"""Per lane; beyond that, adjacent spans of a kind are merged."""


@dataclass(frozen=True, slots=True)
class Span:
    kind: str
    begin_seconds: float
    end_seconds: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    label: str
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Step:
    """The lanes of one iteration, in seconds since it began."""

    label: str
    text: str
    lanes: Sequence[Lane]


def draw_timeline(label: str, steps: Sequence[Step]) -> str:
    ends = [span.end_seconds for step in steps for lane in step.lanes for span in lane.spans]
    scale = Scale(0.0, max(ends, default=1.0) * 1.01, LEFT, WIDE - RIGHT)
    unit = unit_for("seconds", scale.high)
    inside: list[str] = []
    y = 6.0
    for step in steps:
        inside.append(svg.text(clip(step.label, 70), 8, y + 12, class_="bar-label"))
        inside.append(
            svg.text(step.text, WIDE - RIGHT, y + 12, class_="bar-value", text_anchor="end")
        )
        y += 19
        for lane in step.lanes:
            inside.append(_lane(step.label, lane, y, scale))
            y += LANE + GAP
        y += 12
    box = Box(LEFT, 0, WIDE - LEFT - RIGHT, y - 8)
    inside.append(x_axis(box, scale, unit, most=10))
    inside.append(
        svg.text(unit.label("time since the step began"), WIDE - RIGHT, y + 28,
                 class_="axis-label", text_anchor="end")
    )  # fmt: skip
    used = {span.kind for step in steps for lane in step.lanes for span in lane.spans}
    keys = [
        (kind, f"swatch k-{kind}", paint) for kind, paint in KIND_COLORS.items() if kind in used
    ]
    keys_text, height = legend(keys, 8, y + 52, WIDE - 16)
    return svg.drawing("timeline", WIDE, y + 40 + height, label, [*inside, keys_text])


def _lane(label: str, lane: Lane, y: float, scale: Scale) -> str:
    marks = [
        svg.text(lane.label, LEFT - 8, y + 12.5, class_="tick", text_anchor="end"),
        svg.element("rect", x=LEFT, y=y, width=scale.end - LEFT, height=LANE, class_="lane"),
    ]
    for span in merged(lane.spans):
        left, right = scale(span.begin_seconds), scale(span.end_seconds)
        spent = formatting.seconds(span.end_seconds - span.begin_seconds)
        shown = ", ".join(filter(None, (spent, span.text)))
        marks.append(
            svg.element(
                "rect", svg.title(f"{span.kind} {shown}"), x=left, y=y,
                width=max(right - left, 0.6), height=LANE, class_=f"part k-{span.kind}",
                fill=KIND_COLORS.get(span.kind, "#888"), data_label=f"{label}, {lane.label}",
                data_kind=span.kind, data_text=shown, data_begin=svg.datum(span.begin_seconds),
                data_end=svg.datum(span.end_seconds),
            )
        )  # fmt: skip
    return svg.element("g", *marks)


def merged(spans: Sequence[Span], most: int = MAX_SPANS) -> list[Span]:
    """At most `most` spans: adjacent spans of a kind are merged across the shortest gaps."""
    spans = sorted(spans, key=lambda span: span.begin_seconds)
    whole = spans[-1].end_seconds - spans[0].begin_seconds if spans else 0.0
    bound = 0.0
    result = list(spans)
    while len(result) > most:
        bound = bound * 2 or whole / 4000
        result = _merge(spans, bound)
        if bound > whole:
            return result[:most]
    return result


def _merge(spans: Sequence[Span], gap: float) -> list[Span]:
    result: list[Span] = []
    latest: dict[str, int] = {}
    for span in spans:
        index = latest.get(span.kind)
        if index is not None and span.begin_seconds - result[index].end_seconds <= gap:
            before = result[index]
            end = max(before.end_seconds, span.end_seconds)
            result[index] = Span(span.kind, before.begin_seconds, end, "several")
        else:
            latest[span.kind] = len(result)
            result.append(span)
    return result
