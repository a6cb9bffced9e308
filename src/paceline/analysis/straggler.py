"""A worker that the others wait for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass

from paceline.analysis.phases import COMPUTE_PHASES, breakdown_by_rank
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.config.cluster_spec import parse_recorded

WAIT_SHARE = 0.05
"""Waiting for less than this share of an iteration does not matter."""
SLOWER = 1.1
"""A straggler computes at least this many times as long as the others."""
MOSTLY = 0.5
"""Its extra compute time is at least this share of the time that the others wait."""


@dataclass(frozen=True, slots=True)
class Straggler:
    label: str
    """Of the group."""
    rank: int
    node: int
    computing_seconds: float
    """Compute time of the straggler per iteration."""
    others_seconds: float
    """Median compute time of the others."""
    wait_seconds: float
    """Mean time per iteration that the others wait longer than it does."""
    wait_share: float
    """Of the others' iteration."""
    is_injected: bool
    """Whether the configuration slows this worker down."""
    can_rebalance: bool
    """Whether shares by speed are possible and not in use."""

    @property
    def slowdown(self) -> float:
        return self.computing_seconds / self.others_seconds


def find_straggler(group: RunGroup) -> Straggler | None:
    """The worker that computes longest while the others wait; None if there is none."""
    found = [one for run in group.finished if (one := _in_run(group.label, run)) is not None]
    # Chance, unless it is the same worker in most repeats.
    if not found or len(found) * 2 <= len(group.finished):
        return None
    return found[0] if all(one.rank == found[0].rank for one in found) else None


def _slowed_nodes(run: Run) -> Collection[int]:
    """Nodes of an emulated cluster that get less CPU time than the others."""
    return parse_recorded(run.config.cluster).slow if run.config.cluster else ()


def _in_run(label: str, run: Run) -> Straggler | None:
    splits = breakdown_by_rank(run)
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
    # If they wait much longer than it computes, another cause makes them wait.
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
