"""A record as a picture: time and bus bandwidth against size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import RecordsError
from paceline.probe.sizes import size_text


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
        entries = [each for each in record["measurements"] if each["operation"] == operation]
        _draw_operation(row, operation, entries, record["limits"])
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise RecordsError(f"cannot write {path}: {error.strerror}") from None


def _draw_operation(
    row: Any, operation: str, entries: list[dict[str, Any]], limits: dict[str, Any]
) -> None:
    times, rates = row
    algorithms = list(dict.fromkeys(each["algorithm"] for each in entries))
    for way in dict.fromkeys((each["communicator"], each["algorithm"]) for each in entries):
        own = [each for each in entries if (each["communicator"], each["algorithm"]) == way]
        sizes = [each["bytes"] for each in own]
        style = {
            "label": way[1] if way[0] == "torch" else f"{way[1]}, {way[0]}",
            "color": f"C{algorithms.index(way[1])}",
            "marker": "o",
            "markersize": 3,
            "linewidth": 1.2,
            "linestyle": "-" if way[0] == "torch" else "--",
        }
        times.plot(sizes, [each["seconds"]["median"] * 1e3 for each in own], **style)
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
