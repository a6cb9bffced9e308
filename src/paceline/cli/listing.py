"""`paceline list`: registered names."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from paceline.comm.algorithms import ALGORITHMS
from paceline.compression import CODECS
from paceline.data import DATASETS
from paceline.models import MODELS
from paceline.registry import Entry
from paceline.strategies import STRATEGIES
from paceline.study.catalogue import Shipped

SUMMARY = "list strategies, algorithms, codecs, models, data or studies"

KINDS: dict[str, Iterable[Entry]] = {
    "strategies": STRATEGIES,
    "algorithms": ALGORITHMS,
    "codecs": CODECS,
    "models": MODELS,
    "data": DATASETS,
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
        table.add_row(entry.name, entry.summary)
    open_console().print(table)
    return 0
