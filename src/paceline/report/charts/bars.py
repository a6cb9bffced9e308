"""Horizontal bars: stacked parts, or values with whiskers. Labels are above their bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.report.charts import svg
from paceline.report.charts.axes import (
    WIDTH,
    Box,
    Scale,
    clip,
    legend,
    series_class,
    series_color,
    unit_for,
    x_axis,
)

ROW = 40.0
BAR = 15.0
LEFT, RIGHT, TOP = 8.0, 16.0, 6.0


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a bar; `kind` selects its color, also in chart.css."""

    kind: str
    value: float
    text: str = ""
    """Shown in the tooltip."""


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    parts: Sequence[Part]
    text: str = ""
    """At the right end of the label."""
    low: float | None = None
    high: float | None = None
    """Min and max of the whole bar."""
    color_index: int | None = None
    """Color of a bar that stands for one configuration, instead of the colors of its parts."""


@dataclass(frozen=True, slots=True)
class BarChart:
    label: str
    x_label: str
    bars: Sequence[Bar] = field(default_factory=tuple)
    quantity: str = ""
    kinds: Sequence[str] = ()
    """Entries of the legend, in order; empty for no legend."""
    x_high: float | None = None


KIND_COLORS = {
    "input": "#8fbdf0", "forward": "#3f86c6", "backward": "#0b4378", "update": "#2f9f72",
    "exchange": "#c8501e", "wait": "#f0b73f", "evaluate": "#b5aca4", "checkpoint": "#77706a",
    "start-up": "#c9b8d8", "other": "#dedad6", "gradients": "#e08a5e", "parameters": "#0b62a4",
    "buffers": "#14a298", "metrics": "#bd9616", "control": "#77706a",
}  # fmt: skip
"""Compute is blue and green, communication warm, phases between iterations gray."""


def draw_bars(chart: BarChart) -> str:
    box = Box(LEFT, TOP, WIDTH - LEFT - RIGHT, ROW * len(chart.bars))
    ends = [max(sum(part.value for part in bar.parts), bar.high or 0.0) for bar in chart.bars]
    high = chart.x_high if chart.x_high is not None else max(ends, default=0.0) * 1.02
    scale = Scale(0.0, high or 1.0, box.left, box.right)
    unit = unit_for(chart.quantity, scale.high)
    inside = [_bar(index, bar, box, scale) for index, bar in enumerate(chart.bars)]
    inside.append(x_axis(Box(box.left, box.top, box.width, box.height + 4), scale, unit))
    inside.append(
        svg.text(unit.label(chart.x_label), box.right, box.bottom + 40, class_="axis-label",
                 text_anchor="end")
    )  # fmt: skip
    keys = [(kind, f"swatch k-{kind}", KIND_COLORS[kind]) for kind in chart.kinds]
    legend_text, legend_height = legend(keys, LEFT, box.bottom + 64, WIDTH - 2 * LEFT)
    return svg.drawing(
        "bars", WIDTH, box.bottom + 48 + legend_height, chart.label, [*inside, legend_text]
    )


def _bar(index: int, bar: Bar, box: Box, scale: Scale) -> str:
    top = box.top + index * ROW
    marks = [svg.text(clip(bar.label, 46), box.left, top + 13, class_="bar-label")]
    if bar.text:
        marks.append(svg.text(bar.text, box.right, top + 13, class_="bar-value", text_anchor="end"))
    begin = 0.0
    for part in bar.parts:
        left, right = scale(begin), scale(begin + part.value)
        begin += part.value
        if right - left < 0.02:
            continue
        kind, paint = _paint(bar, part)
        marks.append(
            svg.element(
                "rect", svg.title(f"{bar.label}: {part.kind} {part.text}".strip()),
                x=left, y=top + 19, width=right - left, height=BAR, class_=f"part {kind}",
                fill=paint, data_label=bar.label, data_kind=part.kind,
                data_value=svg.datum(part.value), data_text=part.text,
            )
        )  # fmt: skip
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        y = top + 19 + BAR / 2
        marks.append(_whisker(scale(bar.low), scale(bar.high), y, bar))
    return svg.element("g", *marks, class_="bar")


def _paint(bar: Bar, part: Part) -> tuple[str, str]:
    if bar.color_index is not None:
        return series_class(bar.color_index), series_color(bar.color_index)
    return f"k-{part.kind}", KIND_COLORS.get(part.kind, "#888")


def _whisker(left: float, right: float, y: float, bar: Bar) -> str:
    assert bar.low is not None
    assert bar.high is not None
    return svg.element(
        "path", d=f"M{svg.number(left)} {svg.number(y)}H{svg.number(right)}"
        f"M{svg.number(left)} {svg.number(y - 4)}v8M{svg.number(right)} {svg.number(y - 4)}v8",
        class_="error", data_low=svg.datum(bar.low), data_high=svg.datum(bar.high),
    )  # fmt: skip
