"""Why a run did not finish, and how many workers it had."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.world_sizes import WorldSize

NO_RESULT = "no result.json: still running, or killed"


def describe_trouble(group: RunGroup) -> str:
    if group.runs and len(group.finished) == len(group.runs):
        return f"{group.label}: a repeat {cause_text(group)}"
    status = group.status if group.runs else ""
    return ": ".join(filter(None, (group.label, status, cause_text(group))))


def cause_text(group: RunGroup) -> str:
    """Why a run is missing or did not finish, a failure before others; empty where all did."""
    return next(filter(None, map(run_cause, group.unfinished)), group.trouble)


def run_cause(run: Run) -> str:
    return NO_RESULT if run.result is None else run.cause


def world_sizes_text(worlds: Sequence[WorldSize]) -> str:
    first, *others = worlds
    changes = [f"{_workers(world.workers)} from iteration {world.begin:,} on" for world in others]
    return f"{_workers(first.workers)} at first, {', '.join(changes)}"


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"
