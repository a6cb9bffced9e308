"""A worker that the others wait for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass

from paceline.analysis.phases import COMPUTE_PHASES, by_rank
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.config.cluster_spec import parse_recorded

WAIT_SHARE = 0.05
"""Others waiting for less of an iteration than this is no matter."""
SLOWER = 1.1
"""A straggler computes so much longer than the others at least."""
MOSTLY = 0.5
"""What it computes longer is so much of the time that they wait for it at least."""


@dataclass(frozen=True, slots=True)
class Straggler:
    label: str
    """Of the cell."""
    rank: int
    node: int
    computing_seconds: float
    """Of the straggler, in an iteration."""
    others_seconds: float
    """Median of the others' computing."""
    wait_seconds: float
    """That the others wait in an iteration longer than it does, on average."""
    wait_share: float
    """Of the others' iteration."""
    is_injected: bool
    """Whether the run was told to slow this worker down."""
    can_rebalance: bool
    """Whether samples could go to workers by their speed, and do not yet."""


def find_straggler(cell: RunGroup) -> Straggler | None:
    """The worker that computes longest while the others wait; None where nobody holds others up."""
    found = [one for run in cell.finished if (one := _in_run(cell.label, run)) is not None]
    # In most repeats, and the same worker: otherwise it is chance.
    if not found or len(found) * 2 <= len(cell.finished):
        return None
    return found[0] if all(one.rank == found[0].rank for one in found) else None


def _slowed_nodes(run: Run) -> Collection[int]:
    """Of an emulated cluster, those that have less CPU time than the others on purpose."""
    return parse_recorded(run.config.cluster).slow if run.config.cluster else ()


def _in_run(label: str, run: Run) -> Straggler | None:
    splits = by_rank(run)
    if len(splits) < 2:
        return None
    computing = {rank: split.of(COMPUTE_PHASES) for rank, split in splits.items()}
    slowest = max(computing, key=lambda rank: computing[rank])
    others = [rank for rank in splits if rank != slowest]
    wait = math.fsum(splits[rank].seconds["wait"] for rank in others) / len(others)
    total = math.fsum(splits[rank].total for rank in others) / len(others)
    usual = statistics.median(computing[rank] for rank in others)
    extra_wait = wait - splits[slowest].seconds["wait"]
    is_slower = 0 < SLOWER * usual <= computing[slowest]
    # Where they wait for much longer than it computes, it is for something else.
    is_cause = computing[slowest] - usual >= MOSTLY * extra_wait
    if not total or extra_wait < WAIT_SHARE * total or not is_slower or not is_cause:
        return None
    node = next(worker["node"] for worker in run.workers if worker["rank"] == slowest)
    return Straggler(
        label,
        slowest,
        int(node),
        computing[slowest],
        usual,
        extra_wait,
        extra_wait / total,
        is_injected=run.config.slowness(slowest) > 1 or int(node) in _slowed_nodes(run),
        can_rebalance=run.is_synchronous and run.config.shares != ("auto",),
    )
