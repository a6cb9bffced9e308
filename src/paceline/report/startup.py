"""What workers did before their first iteration, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from paceline import formatting
from paceline.analysis.run_group import RunGroup
from paceline.analysis.validation import is_number
from paceline.measure.startup import STARTUP_PARTS
from paceline.report.document import Block, Table, Text


def startup_seconds(cell: RunGroup) -> dict[str, float] | None:
    """By part, the mean over the workers of all finished runs; None if older records lack it."""
    found = [
        parts
        for run in cell.finished
        for worker in run.workers
        if isinstance(parts := worker.get("startup_seconds"), dict)
        and all(is_number(parts.get(part)) for part in STARTUP_PARTS)
    ]
    if not found:
        return None
    return {part: fmean(parts[part] for parts in found) for part in STARTUP_PARTS}


def startup_table(cells: Sequence[RunGroup]) -> list[Block]:
    known = [(cell, spent) for cell in cells if (spent := startup_seconds(cell)) is not None]
    if not known:
        return []
    rows = [
        (cell.label, *(formatting.seconds(spent[part]) if spent[part] else "-" for part in spent))
        for cell, spent in known
    ]
    return [
        Table(("configuration, before the first iteration", *STARTUP_PARTS), rows),
        Text(
            "Start-up of a worker, mean over workers and runs. Imports end before the clock starts;"
            " the rest is part of `other`.",
            "note",
        ),
    ]
