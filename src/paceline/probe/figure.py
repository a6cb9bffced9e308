"""A record as a picture: time and bus bandwidth against size, and what was fitted to the times.

Bars reach from the shortest time to the 95th percentile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import RecordsError
from paceline.probe.sizes import size_text
from paceline.probe.table import rate_text, seconds_text


def draw(record: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    operations = list(dict.fromkeys(each["operation"] for each in record["measurements"]))
    # The figure is made without pyplot, which would keep state and might look for a screen.
    figure = Figure(figsize=(11.5, 0.6 + 3.6 * len(operations)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{record['workers']} workers, {record['nodes']} machine{'s' * (record['nodes'] > 1)}",
        x=0.01,
        ha="left",
        weight="bold",
    )
    panels = figure.subplots(len(operations), 2, squeeze=False)
    for row, operation in zip(panels, operations, strict=True):
        entries, fits = (
            [each for each in record[key] if each["operation"] == operation]
            for key in ("measurements", "fits")
        )
        _draw_operation(row, operation, entries, fits, record["limits"])
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise RecordsError(f"cannot write {path}: {error.strerror}") from None


def _draw_operation(
    row: Any,
    operation: str,
    entries: list[dict[str, Any]],
    fits: list[dict[str, Any]],
    limits: dict[str, Any],
) -> None:
    times, rates = row
    algorithms = list(dict.fromkeys(each["algorithm"] for each in entries))
    for way in dict.fromkeys(map(_way, entries)):
        own = [each for each in entries if _way(each) == way]
        fit = next((each for each in fits if _way(each) == way), None)
        name = way[1] if way[0] == "torch" else f"{way[1]}, {way[0]}"
        sizes = [each["bytes"] for each in own]
        style = {
            "label": f"{name}\n{_fitted(fit)}" if fit else name,
            "color": f"C{algorithms.index(way[1])}",
            "marker": "o",
            "markersize": 3,
            "linewidth": 1.2,
            "linestyle": "-" if way[0] == "torch" else "--",
        }
        milliseconds = [
            [each["seconds"][figure] * 1e3 for each in own] for figure in ("least", "median", "p95")
        ]
        times.plot(sizes, milliseconds[1], **style)
        times.vlines(
            sizes, milliseconds[0], milliseconds[2], color=style["color"], linewidth=0.8, alpha=0.4
        )
        rates.plot(sizes, [each["bus_bytes_per_second"] / 1e9 for each in own], **style)
    for kind, limit in limits.items():
        if limit:
            rates.axhline(limit["bytes_per_second"] / 1e9, color="grey", linewidth=1)
            rates.annotate(
                f"limit of the {kind}",
                (0.02, limit["bytes_per_second"] / 1e9),
                xycoords=("axes fraction", "data"),
                fontsize=8,
                va="bottom",
            )
    times.set_yscale("log")
    times.set_title(f"{operation}: median time, ms", loc="left", fontsize=10)
    rates.set_title(f"{operation}: bus bandwidth, GB/s", loc="left", fontsize=10)
    rates.set_ylim(0, 1.12 * rates.get_ylim()[1])
    ticks = sorted({each["bytes"] for each in entries})[:: max(1, len(entries) // 60 + 1)]
    for panel in row:
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [size_text(size) for size in ticks], rotation=45, fontsize=8)
        panel.minorticks_off()
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    rates.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _way(entry: dict[str, Any]) -> tuple[str, str]:
    return entry["communicator"], entry["algorithm"]


def _fitted(fit: dict[str, Any]) -> str:
    latency = _with_error(seconds_text, fit["latency_seconds"], fit["latency_seconds_error"])
    rate = _with_error(rate_text, fit["bus_bytes_per_second"], fit["bus_bytes_per_second_error"])
    return f"{latency}, {rate}"


def _with_error(text: Callable[[float], str], value: float, error: float | None) -> str:
    return text(value) if error is None else f"{text(value)} \u00b1 {text(error)}"
