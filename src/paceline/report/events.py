"""Whether the events of a finished run are whole: its curves and times are made of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from paceline.records import open_record
from paceline.report.run import Run
from paceline.report.shape import is_number

TAIL_BYTES = 4096
"""What is read of a file; its last line, which tells how the worker ended, is shorter."""


def missing_events(run: Run) -> list[str]:
    """What the workers of a finished run must have written and is not there, in words.

    Elastic runs are passed over: their workers come and go.
    """
    if run.result is None or not run.is_finished or run.config.elastic:
        return []
    told = []
    for worker in run.workers:
        path = run.folder.events_file(worker["rank"])
        if not is_number(worker["iteration_seconds"].get("mean")):
            continue
        if not path.is_file():
            told.append(f"events of rank {worker['rank']} are missing")
        else:
            end = _end(run, worker["rank"])
            # Out of step, a worker's iterations are not those of the run.
            if not _has_end(path) or (run.is_synchronous and end < run.iterations):
                told.append(
                    f"events of rank {worker['rank']} end at iteration {end:,}"
                    f" of {run.iterations:,}"
                )
    return told


def _has_end(path: Path) -> bool:
    try:
        with open_record(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            last = file.read().splitlines()[-1:]
        event = json.loads(last[0]) if last else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(event, dict) and event.get("event") == "end"


def _end(run: Run, rank: int) -> int:
    ranks = run.timing.ranks if run.timing is not None else []
    return next((one.end for one in ranks if one.rank == rank), 0)
