"""The figure of `paceline comm --figure`: time and bus bandwidth against size, and the fits.

Each operation has two panels and a legend with the fitted latency and bus bandwidth of each case.
Colors tell algorithms apart; dashed curves are those of the hierarchical communicator. Bars extend
from the minimum time to the 95th percentile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from paceline.commbench.render import rate_text, seconds_text
from paceline.report.charts import svg
from paceline.report.charts.axes import LEGEND_ROW, WIDTH, clip, series_class, series_color
from paceline.report.charts.lines import (
    HEIGHT_WITHOUT_LEGEND,
    LEFT,
    RIGHT,
    LineChart,
    Series,
    draw_lines,
)

TITLE_HEIGHT = 34.0
GAP_BELOW_LEGEND = 28.0
LATENCY_X, BANDWIDTH_X = 310.0, 500.0
"""Columns of the legend."""
TICK_WIDTH = 54.0
"""Room of a label such as 256 MiB on the axis of sizes."""

Entry = dict[str, Any]
CaseKey = tuple[str, str]


def draw_comm_figure(record: dict[str, Any]) -> str:
    """Return a standalone SVG document of a record of `paceline comm` (commbench/record.py)."""
    machines = f"{record['nodes']} machine{'s' if record['nodes'] > 1 else ''}"
    title = f"{record['workers']} workers, {machines}"
    parts = [svg.text(title, 8, 20, class_="bar-label", font_weight="bold")]
    top = TITLE_HEIGHT
    for operation in dict.fromkeys(entry["operation"] for entry in record["measurements"]):
        entries, fits = (
            [entry for entry in record[key] if entry["operation"] == operation]
            for key in ("measurements", "fits")
        )
        panels, height = _draw_operation(operation, entries, fits, record["limits"], top)
        parts += panels
        top += height
    return svg.standalone(svg.drawing("comm", 2 * WIDTH, top, f"Communication: {title}", parts))


def _draw_operation(
    operation: str, entries: list[Entry], fits: list[Entry], limits: dict[str, Any], top: float
) -> tuple[list[str], float]:
    """The panels and legend of an operation, and their height."""
    algorithms = list(dict.fromkeys(entry["algorithm"] for entry in entries))
    cases = list(dict.fromkeys(map(_case, entries)))
    color_indices = {case: _color_index(case, algorithms) for case in cases}
    sizes = sorted({float(entry["bytes"]) for entry in entries})
    times, rates = [], []
    for case in cases:
        own = [entry for entry in entries if _case(entry) == case]
        x = [float(entry["bytes"]) for entry in own]
        low, median, high = (
            [entry["seconds"][name] for entry in own] for name in ("least", "median", "p95")
        )
        bandwidths = [entry["bus_bytes_per_second"] for entry in own]
        times.append(Series(_name(case), x, median, low, high, color_index=color_indices[case]))
        rates.append(Series(_name(case), x, bandwidths, color_index=color_indices[case]))
    known_limits = [(kind, limit) for kind, limit in limits.items() if limit]
    ends = [sizes[0], sizes[-1]]
    rates += [
        Series(f"{kind} limit", ends, [limit["bytes_per_second"]] * 2, is_guide=True)
        for kind, limit in known_limits
    ]
    ticks = _spaced_ticks(sizes)
    charts = (
        LineChart(
            f"{operation}: median time against size", "size", f"{operation}: median time", times,
            x_quantity="binary_bytes", y_quantity="seconds", x_ticks=ticks, is_x_log=True,
            is_y_log=True, has_legend=False,
        ),
        LineChart(
            f"{operation}: bus bandwidth against size", "size", f"{operation}: bus bandwidth",
            rates, x_quantity="binary_bytes", y_quantity="bytes_per_second", from_zero=True,
            x_ticks=ticks, is_x_log=True, has_legend=False,
        ),
    )  # fmt: skip
    parts = [
        svg.element(
            "svg", draw_lines(chart), x=column * WIDTH, y=top, width=WIDTH,
            height=HEIGHT_WITHOUT_LEGEND,
        )
        for column, chart in enumerate(charts)
    ]  # fmt: skip
    by_case = {_case(fit): fit for fit in fits}
    rows = [
        (f"swatch {series_class(color_indices[case])}", series_color(color_indices[case]),
         _name(case), *_fit_texts(by_case.get(case)))
        for case in cases
    ]  # fmt: skip
    rows += [
        ("swatch guide", "#888", f"{kind} limit", "",
         f"{rate_text(limit['bytes_per_second'])} ({limit['source']})")
        for kind, limit in known_limits
    ]  # fmt: skip
    legend_top = top + HEIGHT_WITHOUT_LEGEND + LEGEND_ROW
    parts.append(_legend(rows, legend_top))
    height = HEIGHT_WITHOUT_LEGEND + LEGEND_ROW * (len(rows) + 1) + GAP_BELOW_LEGEND
    return parts, height


def _legend(rows: Sequence[tuple[str, str, str, str, str]], top: float) -> str:
    """One row per case: class and color of the swatch, name, fitted latency and bandwidth."""
    parts = [
        svg.text(text, x, top, class_="axis-label")
        for text, x in (("fitted latency", LATENCY_X), ("fitted bus bandwidth", BANDWIDTH_X))
    ]
    for index, (kind, paint, name, latency, bandwidth) in enumerate(rows):
        y = top + (index + 1) * LEGEND_ROW
        parts.append(
            svg.element("rect", x=LEFT, y=y - 9, width=13, height=9, rx=2, class_=kind, fill=paint)
        )
        parts.append(svg.text(clip(name), LEFT + 19, y))
        parts.append(svg.text(latency, LATENCY_X, y))
        parts.append(svg.text(bandwidth, BANDWIDTH_X, y))
    return svg.element("g", *parts, class_="legend")


def _fit_texts(fit: Entry | None) -> tuple[str, str]:
    if fit is None:
        return "-", "-"
    return (
        _with_error(seconds_text, fit["latency_seconds"], fit["latency_seconds_error"]),
        _with_error(rate_text, fit["bus_bytes_per_second"], fit["bus_bytes_per_second_error"]),
    )


def _with_error(text: Callable[[float], str], value: float, error: float | None) -> str:
    return text(value) if error is None else f"{text(value)} ± {text(error)}"


def _case(entry: Entry) -> CaseKey:
    return entry["communicator"], entry["algorithm"]


def _name(case: CaseKey) -> str:
    communicator, algorithm = case
    return algorithm if communicator == "torch" else f"{algorithm}, {communicator}"


def _color_index(case: CaseKey, algorithms: list[str]) -> int:
    """The color of the algorithm; another communicator has the same color with dashes."""
    colors = len(svg.PALETTE)
    index = algorithms.index(case[1]) % colors
    return index if case[0] == "torch" else index + colors


def _spaced_ticks(sizes: Sequence[float]) -> list[float]:
    """As many of the sizes as the axis has room to label."""
    span = math.log(sizes[-1] / sizes[0]) or 1.0
    width = WIDTH - LEFT - RIGHT
    ticks: list[float] = []
    for size in sizes:
        if not ticks or math.log(size / ticks[-1]) / span * width * 0.92 >= TICK_WIDTH:
            ticks.append(size)
    return ticks
