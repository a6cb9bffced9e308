"""`paceline list`: registered names."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from paceline.comm.algorithms import ALGORITHMS
from paceline.compression import CODECS
from paceline.data import DATASETS
from paceline.models import MODELS
from paceline.registry import Entry
from paceline.strategies import STRATEGIES
from paceline.study.catalogue import Shipped
from paceline.training import METRICS

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "list strategies, algorithms, codecs, models, data, metrics or studies"

KINDS: dict[str, Iterable[Entry]] = {
    "strategies": STRATEGIES,
    "algorithms": ALGORITHMS,
    "codecs": CODECS,
    "models": MODELS,
    "data": DATASETS,
    "metrics": METRICS,
    "studies": Shipped(),
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", choices=list(KINDS), help=", ".join(KINDS))


def run(arguments: argparse.Namespace) -> int:
    from rich.table import Table

    from paceline.terminal import open_console

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for entry in KINDS[arguments.kind]:
        table.add_row(entry.usage, entry.summary)
    console = open_console()
    console.print(table)
    _print_options(console, KINDS[arguments.kind])
    return 0


def _print_options(console: Console, entries: Iterable[Entry]) -> None:
    """Print each documented option once, with the names that have it."""
    owners: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        for option in entry.options.items():
            owners.setdefault(option, []).append(entry.name)
    for (name, text), names in owners.items():
        console.print(f"\noption {name} of {', '.join(names)}: {text}")
