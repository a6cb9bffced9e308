"""A record as tables that fit a terminal of 80 columns.

A record as a picture: time and bus bandwidth against size, and what was fitted to the times.

Bars reach from the shortest time to the 95th percentile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.commbench.spec import size_text
from paceline.errors import RecordsError
from paceline.terminal import open_console

WIDTH = 80


def print_record(record: dict[str, Any], console: Console | None = None) -> None:
    console = console or open_console(width=WIDTH)
    for section in dict.fromkeys(map(_section, record["measurements"])):
        operation, communicator = section
        console.print(f"\n{operation}, {_through(communicator, record)}", style="bold")
        console.print(_by_size(_of(section, record["measurements"])))
        fits = _of(section, record["fits"])
        if fits:
            console.print(_fitted(fits))
    console.print(_footer(record))


def _section(entry: dict[str, Any]) -> tuple[str, str]:
    return entry["operation"], entry["communicator"]


def _of(section: tuple[str, str], entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if _section(entry) == section]


def _through(communicator: str, record: dict[str, Any]) -> str:
    workers, nodes, tensors = record["workers"], record["nodes"], record["tensors"]
    between = "NCCL" if tensors == "own GPUs" else "gloo"
    if communicator == "torch":
        how = between
    else:
        how = "shared memory" if nodes == 1 else f"shared memory and {between}"
    where = "one machine" if nodes == 1 else f"{nodes} machines"
    on = "" if tensors == "main memory" else f", {tensors}"
    return f"{how} ({communicator}), {workers} workers on {where}{on}"


def _by_size(entries: list[dict[str, Any]]) -> Table:
    table = _table("size", "algorithm", "mean", "median", "p95", "algbw", "busbw", "of limit")
    shown = None
    for entry in entries:
        seconds = entry["seconds"]
        table.add_row(
            size_text(entry["bytes"]) if entry["bytes"] != shown else "",
            entry["algorithm"],
            *(seconds_text(seconds[name]) for name in ("mean", "median", "p95")),
            rate_text(entry["algorithm_bytes_per_second"]),
            rate_text(entry["bus_bytes_per_second"]),
            _share(entry["share_of_limit"]),
        )
        shown = entry["bytes"]
    return table


def _fitted(fits: list[dict[str, Any]]) -> Table:
    table = _table("fitted over the sizes", "latency", "error", "busbw", "error", "of limit")
    for entry in fits:
        table.add_row(
            entry["algorithm"],
            seconds_text(entry["latency_seconds"]),
            _or_dash(seconds_text, entry["latency_seconds_error"]),
            rate_text(entry["bus_bytes_per_second"]),
            _or_dash(rate_text, entry["bus_bytes_per_second_error"]),
            _share(entry["share_of_limit"]),
        )
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for title in titles:
        is_text = title in ("algorithm", "fitted over the sizes")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=True)
    return table


def _footer(record: dict[str, Any]) -> str:
    lines = ["", "times are the slowest worker's; bandwidths are of the median"]
    for kind, limit in record["limits"].items():
        if limit:
            lines.append(
                f"limit of the {kind}: {rate_text(limit['bytes_per_second'])}, {limit['source']}"
            )
    if any(entry["latency_seconds_error"] is None for entry in record["fits"]):
        lines.append("two sizes are too few for errors of the fit: give three or more in --sizes")
    if unfitted := _unfitted(record):
        lines.append(
            f"{unfitted} without a fit, since times did not clearly rise with size: give larger"
            " sizes or a quieter machine"
        )
    lines += [f"warning: {text}" for text in (record["cluster"] or {}).get("warnings", ())]
    if record["left_out"]:
        count = len(record["left_out"])
        lines.append(f"{count} left out, since smaller sizes took too long: raise --most-seconds")
    return "\n".join(lines)


def _unfitted(record: dict[str, Any]) -> int:
    """Ways that were measured at two sizes or more, and have no line through them."""
    sizes = Counter((*_section(each), each["algorithm"]) for each in record["measurements"])
    fitted = {(*_section(each), each["algorithm"]) for each in record["fits"]}
    return sum(count > 1 and way not in fitted for way, count in sizes.items())


def seconds_text(value: float) -> str:
    """In eight characters."""
    if value < 0.0009995:
        return f"{value * 1e6:.3g} us" if value < 99.5e-6 else f"{value * 1e6:.0f} us"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms"
    return f"{value:.3g} s" if value < 99.5 else f"{value:.0f} s"


def rate_text(bytes_per_second: float) -> str:
    """In nine characters."""
    value, units = bytes_per_second, iter(("B/s", "kB/s", "MB/s"))
    unit = next(units)
    while value >= 999.5 and unit != "GB/s":
        value, unit = value / 1000, next(units, "GB/s")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def _or_dash(text: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else text(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


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
            "label": f"{name}\n{_fitted_line(fit)}" if fit else name,
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


def _fitted_line(fit: dict[str, Any]) -> str:
    latency = _with_error(seconds_text, fit["latency_seconds"], fit["latency_seconds_error"])
    rate = _with_error(rate_text, fit["bus_bytes_per_second"], fit["bus_bytes_per_second_error"])
    return f"{latency}, {rate}"


def _with_error(text: Callable[[float], str], value: float, error: float | None) -> str:
    return text(value) if error is None else f"{text(value)} \u00b1 {text(error)}"
