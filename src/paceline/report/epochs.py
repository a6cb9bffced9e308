"""Time for an epoch, with the first one apart: it pays for starting up."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.phases import hidden_of_run, of_iteration
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
    if not run.is_synchronous:
        # Workers did unequal numbers of iterations: only their sums are those of the run.
        return _in_epoch(run, [worker["phases"]["exchange"] for worker in run.workers])
    count, split = iterations_in_epoch(run), of_iteration(run)
    return None if count is None or split is None else split.seconds["exchange"] * count


def hidden_seconds_in_epoch(run: Run) -> float | None:
    """Overlapped communication, on average over the workers; None where it was not measured."""
    if not run.is_synchronous:
        hidden = [worker.get("hidden_exchange_seconds") for worker in run.workers]
        measured = [seconds for seconds in hidden if seconds is not None]
        return _in_epoch(run, measured) if len(measured) == len(hidden) else None
    count, seconds = iterations_in_epoch(run), hidden_of_run(run)
    return None if count is None or seconds is None else seconds * count


def _in_epoch(run: Run, spent: Sequence[float]) -> float | None:
    """The mean of what each worker spent in the whole run, as a part for one epoch."""
    count = iterations_in_epoch(run)
    if count is None or not spent or not run.iterations or run.is_resized:
        return None
    return float(sum(spent) / len(spent) / run.iterations * count)
