"""What a worker spent in its iterations, by phase.

The phases of a result are sums over the whole run. In a short run it shows that workers also meet
after the last iteration: there the phases are taken as they were written when that had ended.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from paceline.report.shape import is_number

IN_ITERATION = ("input", "forward", "backward", "update", "exchange", "wait")
"""Computing first, then what comes of being several."""
BESIDE = 0.002
"""More than this of the iterations' time beside them is worth leaving out."""
TAIL_BYTES = 1_000_000
"""Of a file of events: enough for the last lines of it."""


def in_iterations(worker: dict[str, Any], total_seconds: float, events: Path) -> dict[str, float]:
    """A worker's phases up to the end of its last iteration; all iterations took the total."""
    whole = {phase: float(worker["phases"][phase]) for phase in IN_ITERATION}
    spent = math.fsum(whole.values())
    if not total_seconds or spent <= (1 + BESIDE) * total_seconds:
        return whole
    written = last_phases(events)
    if written is None or abs(math.fsum(written.values()) - total_seconds) > spent - total_seconds:
        return whole
    # What of an exchange was waiting is known only at the end of a run.
    both = whole["exchange"] + whole["wait"]
    meeting = written["exchange"] + written["wait"]
    waiting = meeting * whole["wait"] / both if both else 0.0
    return {**written, "exchange": meeting - waiting, "wait": waiting}


def last_phases(path: Path) -> dict[str, float] | None:
    """The phases of iterations as a worker last wrote them; None where it wrote none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            event = json.loads(line) if b'"phases"' in line else {}
        except ValueError:
            continue
        found = event.get("phases") if isinstance(event, dict) else None
        if isinstance(found, dict) and all(is_number(found.get(phase)) for phase in IN_ITERATION):
            return {phase: float(found[phase]) for phase in IN_ITERATION}
    return None
