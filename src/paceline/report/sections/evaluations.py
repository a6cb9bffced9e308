"""The evaluations as the console showed them: epoch, rank, loss, accuracy, rate, wall time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline import formatting
from paceline.analysis.validation import is_number
from paceline.records import open_record
from paceline.report.document import Block, Details, Table
from paceline.report.sections.outline import SectionContext

TITLE = "Evaluations"
MOST_ROWS = 25
"""Of one cell: the first, the last, and evenly between them."""
KEYS = ("iteration", "epoch", "rank", "test_loss", "test_accuracy", "learning_rate", "wall_seconds")


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Of one worker's events, which are mostly something else: only what may fit is parsed.

    What a resumed run did again is told as it was the last time.
    """
    found: list[dict[str, Any]] = []
    try:
        with open_record(path) as file:
            for line in file:
                if b'"evaluation"' in line or b'"start"' in line:
                    _take(line, found)
    except OSError:
        return []
    return found


def _take(line: bytes, found: list[dict[str, Any]]) -> None:
    """A line that was cut short or is something else is passed over."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return
    kind = event.get("event") if isinstance(event, dict) else None
    if kind == "start" and is_number(event.get("iteration")):
        while found and found[-1]["iteration"] > event["iteration"]:
            found.pop()
    if kind == "evaluation" and all(is_number(event.get(key)) for key in KEYS):
        found.append(event)


def build(outline: SectionContext) -> list[Block]:
    blocks: list[Block] = []
    for cell in outline.plotted:
        run = next(iter(cell.shown), None)
        entries = read_evaluations(run.folder.events_file(0)) if run is not None else []
        if entries:
            blocks.append(Details(f"{cell.label} ({len(entries)})", [_table(_thinned(entries))]))
    return blocks


def _thinned(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(entries) <= MOST_ROWS:
        return entries
    step = (len(entries) - 1) / (MOST_ROWS - 1)
    return [entries[round(index * step)] for index in range(MOST_ROWS)]


def _table(entries: list[dict[str, Any]]) -> Table:
    columns = ("epoch", "rank", "validation loss", "validation accuracy", "learning rate",
               "wall time")  # fmt: skip
    rows = [
        (
            f"{entry['epoch']:.2f}",
            str(entry["rank"]),
            formatting.number(entry["test_loss"]),
            formatting.number(entry["test_accuracy"]),
            f"{entry['learning_rate']:.3g}",
            formatting.seconds(entry["wall_seconds"]),
        )
        for entry in entries
    ]
    return Table(columns, rows)
