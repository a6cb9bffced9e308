"""Curves over a common axis, with their spread, as SVG.

Each series carries its numbers in data attributes: what is shown when the pointer rests on it, and
what the page redraws from when a reader looks closer.
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
    colour,
    horizontal_grid,
    legend,
    limits,
    log_limits,
    tone,
    unit_for,
    vertical_ticks,
)

PLOT_HEIGHT = 216.0
LEFT, TOP, RIGHT = 58.0, 34.0, 14.0
HEIGHT_WITHOUT_LEGEND = TOP + PLOT_HEIGHT + 46
DOTS_UP_TO = 30
"""Where no curve has more points than this, each is marked."""
SAME = 0.5
"""Curves that are nowhere further apart than this on the screen cannot be told apart."""
STRIPE = 10.0
"""Length of the stripes in which such curves take turns."""

Places = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Stripe:
    """Of a curve among those that lie on one another: which one it is, of how many."""

    number: int
    of: int

    @property
    def style(self) -> str | None:
        """The first is drawn whole, below the others."""
        if self.number == 0:
            return None
        return (
            f"stroke-dasharray:{svg.number(STRIPE)} {svg.number(STRIPE * (self.of - 1))};"
            f"stroke-dashoffset:{svg.number(-self.number * STRIPE)}"
        )


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """The spread at each point; none where it is not known."""
    place: int = 0
    """Decides the colour: the same cell has the same place in all figures of a report."""
    is_guide: bool = False
    """A line to hold others against, such as the ideal."""


@dataclass(frozen=True, slots=True)
class LineChart:
    label: str
    """What is seen, for those who do not see it."""
    x_label: str
    y_label: str
    series: Sequence[Series] = field(default_factory=tuple)
    x_quantity: str = ""
    y_quantity: str = ""
    from_zero: bool = False
    x_ticks: Sequence[float] | None = None
    y_top: float | None = None
    """Where the axis ends, if not at the greatest value; what is beyond is cut off."""
    is_x_log: bool = False
    is_y_log: bool = False
    """Logarithmic axes are for standalone figures: the page's zoom redraws linear ones only."""
    has_legend: bool = True


def draw_lines(chart: LineChart) -> str:
    shown = [series for series in chart.series if len(series.x)]
    all_x = (value for series in shown for value in series.x)
    x_low, x_high = log_limits(all_x) if chart.is_x_log else limits(all_x)
    top = math.inf if chart.y_top is None else chart.y_top
    every = (value for series in shown for values in (series.y, series.low, series.high)
             for value in values)  # fmt: skip
    all_y = (value for value in every if abs(value) <= top)
    y_low, y_high = (
        log_limits(all_y) if chart.is_y_log else limits(all_y, from_zero=chart.from_zero)
    )
    y_high = min(y_high, top)
    keys = [
        (series.label, f"swatch {tone(series.place)}" if not series.is_guide else "swatch guide",
         colour(series.place) if not series.is_guide else "#888") for series in shown
    ]  # fmt: skip
    box = Box(LEFT, TOP, WIDTH - LEFT - RIGHT, PLOT_HEIGHT)
    legend_text, legend_height = legend(
        keys if chart.has_legend else [], 8, box.bottom + 60, WIDTH - 16
    )
    x_scale = Scale(x_low, x_high, box.left, box.right, is_log=chart.is_x_log)
    y_scale = Scale(y_low, y_high, box.bottom, box.top, is_log=chart.is_y_log)
    x_unit = unit_for(chart.x_quantity, x_high)
    y_unit = unit_for(chart.y_quantity, y_high)
    has_dots = max((len(series.x) for series in shown), default=0) <= DOTS_UP_TO
    routes = [
        [(x_scale(x), y_scale(y)) for x, y in zip(series.x, series.y, strict=True)]
        for series in shown
    ]
    turns = assign_stripes(routes)
    frame = f"{svg.data((box.left, box.top, box.width, box.height))}"
    inside = [
        svg.text(chart.y_label if chart.is_y_log else y_unit.label(chart.y_label), 8, 14,
                 class_="axis-label"),
        svg.text(chart.x_label if chart.is_x_log else x_unit.label(chart.x_label), box.right,
                 box.bottom + 36, class_="axis-label", text_anchor="end"),
        horizontal_grid(box, y_scale, y_unit, chart.y_quantity),
        vertical_ticks(box, x_scale, x_unit, chart.x_ticks, quantity=chart.x_quantity),
        svg.element(
            "svg",
            *(
                _draw(index, series, (x_scale, y_scale), routes[index], turns[index], has_dots)
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
        data_x_label=chart.x_label,
    )  # fmt: skip


def assign_stripes(routes: Sequence[Places]) -> list[Stripe]:
    """Curves that lie on one another are drawn in stripes, so that all are seen."""
    groups: list[list[int]] = []
    for index, route in enumerate(routes):
        for group in groups:
            if _coincide(routes[group[0]], route):
                group.append(index)
                break
        else:
            groups.append([index])
    turns = {
        index: Stripe(number, len(group)) for group in groups for number, index in enumerate(group)
    }
    return [turns[index] for index in range(len(routes))]


def _coincide(one: Places, other: Places) -> bool:
    return len(one) == len(other) > 1 and all(
        abs(a[0] - b[0]) <= SAME and abs(a[1] - b[1]) <= SAME
        for a, b in zip(one, other, strict=True)
    )


def _draw(
    index: int,
    series: Series,
    scales: tuple[Scale, Scale],
    places: Places,
    turn: Stripe,
    has_dots: bool,
) -> str:
    paint = colour(series.place)
    x_scale, y_scale = scales
    has_spread = len(series.low) == len(series.x) and list(series.low) != list(series.high)
    marks = []
    if has_spread:
        upper = [(x_scale(x), y_scale(y)) for x, y in zip(series.x, series.high, strict=True)]
        lower = [(x_scale(x), y_scale(y)) for x, y in zip(series.x, series.low, strict=True)]
        if len(places) <= DOTS_UP_TO:
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
        svg.element("polyline", points=svg.points(places), class_="line", stroke=paint, fill="none",
                    style=turn.style)
    )  # fmt: skip
    if (has_dots or len(places) == 1) and not series.is_guide:
        marks += [
            svg.element("circle", cx=x, cy=y, r=3, class_="dot", fill=paint, data_at=at)
            for at, (x, y) in enumerate(places)
            if at % turn.of == turn.number
        ]
    return svg.element(
        "g", *marks, class_="series guide" if series.is_guide else f"series {tone(series.place)}",
        data_series=index, data_label=series.label, data_x=svg.data(series.x),
        data_y=svg.data(series.y), data_low=svg.data(series.low) if has_spread else None,
        data_high=svg.data(series.high) if has_spread else None,
    )  # fmt: skip
