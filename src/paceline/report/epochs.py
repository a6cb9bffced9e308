"""Time for an epoch, with the first one apart: it pays for starting up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from paceline.report.run import Run


def iterations_in_epoch(run: Run) -> float | None:
    """As the evaluations tell; None where there are none."""
    entries = [entry for entry in run.history if entry["epoch"] > 0 and entry["iteration"] > 0]
    if not entries:
        return None
    return float(entries[-1]["iteration"] / entries[-1]["epoch"])


def epoch_seconds(run: Run) -> float | None:
    """Of an epoch of usual iterations, the first of the run left out."""
    count, seconds = iterations_in_epoch(run), run.iteration_seconds
    return None if count is None or seconds is None else seconds * count


def first_epoch_seconds(run: Run) -> float | None:
    """Training time up to the end of the first epoch; None where that was not evaluated."""
    return next((float(one["seconds"]) for one in run.history if one["epoch"] == 1), None)


def exchange_seconds_in_epoch(run: Run) -> float | None:
    """Exposed communication, on average over the workers."""
    return _in_epoch(run, lambda worker: worker["phases"]["exchange"])


def hidden_seconds_in_epoch(run: Run) -> float | None:
    """Communication behind computing, on average over the workers."""
    return _in_epoch(run, lambda worker: worker.get("hidden_exchange_seconds", 0.0))


def _in_epoch(run: Run, spent: Callable[[dict[str, Any]], float]) -> float | None:
    """The mean of what each worker spent in all its iterations, as a part for one epoch."""
    count = iterations_in_epoch(run)
    of_iteration = [
        spent(worker) / iterations
        for worker in run.workers
        if (iterations := run.iterations_of(int(worker["rank"])))
    ]
    if count is None or not of_iteration:
        return None
    return math.fsum(of_iteration) / len(of_iteration) * count
