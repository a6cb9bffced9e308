"""Tables of a benchmark record that fit a terminal of 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.commbench.spec import size_text
from paceline.terminal import open_console

WIDTH = 80


def print_record(record: dict[str, Any], console: Console | None = None) -> None:
    """Print a table of times and one of fits for each operation and communicator."""
    console = console or open_console(width=WIDTH)
    for section in dict.fromkeys(map(_section, record["measurements"])):
        operation, communicator = section
        console.print(f"\n{operation}, {_describe(communicator, record)}", style="bold")
        console.print(_times_table(_of(section, record["measurements"])))
        fits = _of(section, record["fits"])
        if fits:
            console.print(_fits_table(fits))
    if record.get("codecs"):
        console.print("\nencoding and decoding, without communication", style="bold")
        console.print(_codecs_table(record["codecs"]))
    console.print(_footer(record))


def _section(entry: dict[str, Any]) -> tuple[str, str]:
    return entry["operation"], entry["communicator"]


def _of(section: tuple[str, str], entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if _section(entry) == section]


def _describe(communicator: str, record: dict[str, Any]) -> str:
    workers, nodes, tensors = record["workers"], record["nodes"], record["tensors"]
    between = "NCCL" if tensors == "own GPUs" else "gloo"
    if communicator == "torch":
        transport = between
    else:
        transport = "shared memory" if nodes == 1 else f"shared memory and {between}"
    where = "one machine" if nodes == 1 else f"{nodes} machines"
    on = "" if tensors == "main memory" else f", {tensors}"
    return f"{transport} ({communicator}), {workers} workers on {where}{on}"


def _times_table(entries: list[dict[str, Any]]) -> Table:
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


def _fits_table(fits: list[dict[str, Any]]) -> Table:
    table = _table("fit over all sizes", "latency", "error", "busbw", "error", "of limit")
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


def _codecs_table(entries: list[dict[str, Any]]) -> Table:
    table = _table("codec", "size", "workers", "mean", "median", "p95")
    for entry in entries:
        seconds = entry["seconds"]
        table.add_row(
            entry["codec"],
            size_text(entry["bytes"]),
            str(entry["workers"]),
            *(seconds_text(seconds[name]) for name in ("mean", "median", "p95")),
        )
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for title in titles:
        is_text = title in ("algorithm", "codec", "fit over all sizes")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=True)
    return table


def _footer(record: dict[str, Any]) -> str:
    lines = ["", "times are the slowest worker's; bandwidths use the median time"]
    for kind, limit in record["limits"].items():
        if limit:
            lines.append(f"{kind} limit: {rate_text(limit['bytes_per_second'])}, {limit['source']}")
    if any(entry["latency_seconds_error"] is None for entry in record["fits"]):
        lines.append("errors of the fit need at least three sizes: extend --sizes")
    if unfitted := _unfitted(record):
        lines.append(
            f"{unfitted} without a fit because times do not clearly rise with size: use larger"
            " sizes or an idle machine"
        )
    lines += [f"warning: {text}" for text in (record["cluster"] or {}).get("warnings", ())]
    if record["left_out"]:
        count = len(record["left_out"])
        lines.append(f"{count} skipped because smaller sizes took too long: raise --most-seconds")
    return "\n".join(lines)


def _unfitted(record: dict[str, Any]) -> int:
    """Number of cases with at least two sizes and no fit."""
    sizes = Counter((*_section(each), each["algorithm"]) for each in record["measurements"])
    fitted = {(*_section(each), each["algorithm"]) for each in record["fits"]}
    return sum(count > 1 and case not in fitted for case, count in sizes.items())


def seconds_text(value: float) -> str:
    """In at most eight characters."""
    if value < 0.0009995:
        return f"{value * 1e6:.3g} us" if value < 99.5e-6 else f"{value * 1e6:.0f} us"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms"
    return f"{value:.3g} s" if value < 99.5 else f"{value:.0f} s"


def rate_text(bytes_per_second: float) -> str:
    """In at most nine characters."""
    value, units = bytes_per_second, iter(("B/s", "kB/s", "MB/s"))
    unit = next(units)
    while value >= 999.5 and unit != "GB/s":
        value, unit = value / 1000, next(units, "GB/s")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def _or_dash(text: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else text(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
