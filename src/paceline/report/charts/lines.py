"""Line charts with min and max of each point.

Each series has its values in data attributes, from which the page shows tooltips and redraws the
chart when zooming.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.report.charts import svg
from paceline.report.charts.axes import (
    WIDTH,
    Box,
    Scale,
    legend,
    limits,
    log_limits,
    series_class,
    series_color,
    unit_for,
    x_axis,
    y_axis,
)

PLOT_HEIGHT = 216.0
LEFT, TOP, RIGHT = 58.0, 34.0, 14.0
HEIGHT_WITHOUT_LEGEND = TOP + PLOT_HEIGHT + 46
DOTS_UP_TO = 30
"""Points are marked if no series has more of them."""
MAX_COINCIDING_DISTANCE = 0.5
"""Lines that are nowhere further apart coincide."""
STRIPE_LENGTH = 10.0

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Stripe:
    """The position of a line among coinciding lines, and their number."""

    number: int
    of: int

    @property
    def style(self) -> str | None:
        """None for the first line, which is solid and below the others."""
        if self.number == 0:
            return None
        gap = STRIPE_LENGTH * (self.of - 1)
        return (
            f"stroke-dasharray:{svg.number(STRIPE_LENGTH)} {svg.number(gap)};"
            f"stroke-dashoffset:{svg.number(-self.number * STRIPE_LENGTH)}"
        )


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """Min and max at each point; empty if unknown."""
    color_index: int = 0
    """The same for a configuration in all figures of a report."""
    is_guide: bool = False
    """A reference line, such as the ideal."""
    has_line: bool = True
    """Whether the points are connected."""
    hollow: Sequence[int] = ()
    """Indices of points that differ from the others, such as extrapolated ones."""


@dataclass(frozen=True, slots=True)
class LineChart:
    label: str
    """Title for screen readers."""
    x_label: str
    y_label: str
    series: Sequence[Series] = field(default_factory=tuple)
    x_quantity: str = ""
    y_quantity: str = ""
    from_zero: bool = False
    x_ticks: Sequence[float] | None = None
    y_top: float | None = None
    """Upper limit of the axis, if not the maximum; values beyond it are cut off."""
    is_x_log: bool = False
    is_y_log: bool = False
    has_legend: bool = True


def draw_lines(chart: LineChart) -> str:
    shown = [series for series in chart.series if len(series.x)]
    all_x = (value for series in shown for value in series.x)
    x_low, x_high = log_limits(all_x) if chart.is_x_log else limits(all_x)
    top = math.inf if chart.y_top is None else chart.y_top
    all_values = (value for series in shown for values in (series.y, series.low, series.high)
             for value in values)  # fmt: skip
    all_y = (value for value in all_values if abs(value) <= top)
    y_low, y_high = (
        log_limits(all_y) if chart.is_y_log else limits(all_y, from_zero=chart.from_zero)
    )
    y_high = min(y_high, top)
    keys = [
        (series.label, "swatch guide", "#888")
        if series.is_guide
        else (
            series.label,
            f"swatch {series_class(series.color_index)}",
            series_color(series.color_index),
        )
        for series in shown
    ]
    box = Box(LEFT, TOP, WIDTH - LEFT - RIGHT, PLOT_HEIGHT)
    legend_text, legend_height = legend(
        keys if chart.has_legend else [], 8, box.bottom + 60, WIDTH - 16
    )
    x_scale = Scale(x_low, x_high, box.left, box.right, is_log=chart.is_x_log)
    y_scale = Scale(y_low, y_high, box.bottom, box.top, is_log=chart.is_y_log)
    x_unit = unit_for(chart.x_quantity, x_high)
    y_unit = unit_for(chart.y_quantity, y_high)
    has_dots = max((len(series.x) for series in shown), default=0) <= DOTS_UP_TO
    lines = [
        [(x_scale(x), y_scale(y)) for x, y in zip(series.x, series.y, strict=True)]
        for series in shown
    ]
    stripes = assign_stripes(lines)
    frame = f"{svg.data((box.left, box.top, box.width, box.height))}"
    inside = [
        svg.text(chart.y_label if chart.is_y_log else y_unit.label(chart.y_label), 8, 14,
                 class_="axis-label"),
        svg.text(chart.x_label if chart.is_x_log else x_unit.label(chart.x_label), box.right,
                 box.bottom + 36, class_="axis-label", text_anchor="end"),
        y_axis(box, y_scale, y_unit, chart.y_quantity),
        x_axis(box, x_scale, x_unit, chart.x_ticks, quantity=chart.x_quantity),
        svg.element(
            "svg",
            *(
                _draw(index, series, (x_scale, y_scale), lines[index], stripes[index], has_dots)
                for index, series in enumerate(shown)
            ),
            x=box.left, y=box.top, width=box.width, height=box.height, class_="plot",
            viewBox=f"{svg.number(box.left)} {svg.number(box.top)}"
                    f" {svg.number(box.width)} {svg.number(box.height)}",
        ),
        legend_text,
    ]  # fmt: skip
    return svg.drawing(
        "lines", WIDTH, HEIGHT_WITHOUT_LEGEND + legend_height, chart.label, inside,
        data_box=frame, data_x_limits=svg.data((x_low, x_high)),
        data_y_limits=svg.data((y_low, y_high)),
        data_x_unit=x_unit.name, data_x_factor=svg.datum(x_unit.factor),
        data_y_unit=y_unit.name, data_y_factor=svg.datum(y_unit.factor),
        data_x_label=chart.x_label, data_x_log="" if chart.is_x_log else None,
        data_y_log="" if chart.is_y_log else None,
    )  # fmt: skip


def assign_stripes(lines: Sequence[Points]) -> list[Stripe]:
    """Coinciding lines are drawn as alternating stripes, so that all are visible."""
    groups: list[list[int]] = []
    for index, line in enumerate(lines):
        for group in groups:
            if _coincide(lines[group[0]], line):
                group.append(index)
                break
        else:
            groups.append([index])
    stripes = {
        index: Stripe(number, len(group)) for group in groups for number, index in enumerate(group)
    }
    return [stripes[index] for index in range(len(lines))]


def _coincide(one: Points, other: Points) -> bool:
    return len(one) == len(other) > 1 and all(
        abs(a[0] - b[0]) <= MAX_COINCIDING_DISTANCE and abs(a[1] - b[1]) <= MAX_COINCIDING_DISTANCE
        for a, b in zip(one, other, strict=True)
    )


def _draw(
    index: int,
    series: Series,
    scales: tuple[Scale, Scale],
    points: Points,
    stripe: Stripe,
    has_dots: bool,
) -> str:
    paint = series_color(series.color_index)
    x_scale, y_scale = scales
    has_spread = len(series.low) == len(series.x) and list(series.low) != list(series.high)
    marks = []
    if has_spread:
        upper = [(x_scale(x), y_scale(y)) for x, y in zip(series.x, series.high, strict=True)]
        lower = [(x_scale(x), y_scale(y)) for x, y in zip(series.x, series.low, strict=True)]
        if len(points) <= DOTS_UP_TO:
            marks += [
                svg.element("line", x1=top[0], x2=top[0], y1=top[1], y2=bottom[1],
                            class_="whisker", stroke=paint)
                for top, bottom in zip(upper, lower, strict=True)
            ]  # fmt: skip
        else:
            marks.append(
                svg.element("polygon", points=svg.points(upper + lower[::-1]), class_="band",
                            fill=paint, fill_opacity="0.18")
            )  # fmt: skip
    marks.append(
        svg.element("polyline", points=svg.points(points), class_="line", stroke=paint, fill="none",
                    stroke_opacity=None if series.has_line else "0", style=stripe.style)
    )  # fmt: skip
    if (has_dots or len(points) == 1) and not series.is_guide:
        marks += [
            svg.element(
                "circle",
                cx=x,
                cy=y,
                r=3,
                fill=paint,
                data_at=at,
                class_="dot hollow" if at in series.hollow else "dot",
            )
            for at, (x, y) in enumerate(points)
            if at % stripe.of == stripe.number
        ]
    return svg.element(
        "g", *marks,
        class_=f"series {'guide' if series.is_guide else series_class(series.color_index)}",
        data_series=index, data_label=series.label, data_x=svg.data(series.x),
        data_y=svg.data(series.y), data_low=svg.data(series.low) if has_spread else None,
        data_high=svg.data(series.high) if has_spread else None,
    )  # fmt: skip
