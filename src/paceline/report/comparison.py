"""Several runs side by side: first what was asked differently, then what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.records import PHASES, Result
from paceline.report import units

RUNS_IN_A_TABLE = 4
"""As many as fit 80 columns beside the names of the rows."""

IGNORED_SETTINGS = ("out", "name")


def print_comparison(results: Sequence[Result]) -> None:
    console = Console(highlight=False, markup=False)
    rest = iter(results)
    while block := list(islice(rest, RUNS_IN_A_TABLE)):
        console.print(comparison_table(block, differing_settings(results)))
        console.print()


def differing_settings(results: Sequence[Result]) -> list[str]:
    """The settings that are not the same in all runs."""
    names = dict.fromkeys(name for result in results for name in result["config"])
    return [
        name
        for name in names
        if name not in IGNORED_SETTINGS
        and any(result["config"].get(name) != results[0]["config"].get(name) for result in results)
    ]


def comparison_table(results: Sequence[Result], settings: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column()
    for result in results:
        table.add_column(result["id"], justify="right", overflow="fold")
    for name in settings:
        table.add_row(name, *(_setting(result["config"].get(name)) for result in results))
    if settings:
        table.add_section()
    for name, cell in ROWS.items():
        cells = [cell(result) for result in results]
        if any(text != "-" for text in cells):
            table.add_row(name, *cells)
    for phase in PHASES:
        shares = [_phase_share(result, phase) for result in results]
        if any(shares):
            table.add_row(phase, *(units.share(value) for value in shares))
    return table


def _setting(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items()) or "-"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _phase_share(result: Result, phase: str) -> float:
    wall = sum(worker["wall_seconds"] for worker in result["workers"])
    spent: float = sum(worker["phases"][phase] for worker in result["workers"])
    return spent / wall if wall else 0.0


def _iteration(result: Result, figure: str) -> str:
    """Of the first worker, where any could report."""
    workers = result["workers"]
    return units.seconds(workers[0]["iteration_seconds"][figure]) if workers else "-"


def _node_sum(result: Result, key: str) -> float | None:
    values = [node.get(key) for node in result["nodes"]]
    return None if None in values else sum(values)


ROWS: dict[str, Callable[[Result], str]] = {
    "status": lambda result: str(result["status"]),
    "test accuracy": lambda result: units.number(result["final"].get("test_accuracy")),
    "test loss": lambda result: units.number(result["final"].get("test_loss")),
    "training loss": lambda result: units.number(result["final"].get("train_loss")),
    "wall time": lambda result: units.seconds(result["wall_seconds"]),
    "time to target": lambda result: units.seconds(result["seconds_to_target"]),
    "iterations": lambda result: units.count(result["iterations"]),
    "iteration, median": lambda result: _iteration(result, "median"),
    "iteration, p95": lambda result: _iteration(result, "p95"),
    "CPU, mean": lambda result: units.percent(_node_sum(result, "cpu_percent_mean")),
    "memory, mean": lambda result: units.size(_node_sum(result, "rss_bytes_mean")),
    "memory, peak": lambda result: units.size(_node_sum(result, "rss_bytes_peak")),
    "checkpoints": lambda result: units.count(result["checkpoints"].get("count")),
    "weights": lambda result: (result["weights_sha256"] or "-")[:12],
}
