"""Work and time of each rank, how rank 0 differs from the others, and stragglers."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from paceline.analysis.phases import COMPUTE_PHASES, PhaseBreakdown, breakdown_by_rank, mean_split
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup, known
from paceline.config.cluster_spec import parse_recorded

WAIT_SHARE = 0.05
"""Waiting for less than this share of an iteration does not matter."""
SLOWER = 1.1
"""A straggler computes at least this many times as long as the others."""
MOSTLY = 0.5
"""Its extra compute time is at least this share of the time that the others wait."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Mean seconds per iteration of each rank, one value per finished run."""

    label: str
    by_rank: dict[int, list[float]]

    @property
    def rank_0(self) -> list[float]:
        return self.by_rank.get(0, [])

    @property
    def others(self) -> list[float]:
        return [mean for rank, means in self.by_rank.items() if rank for mean in means]


def rank_times(group: RunGroup) -> RankTimes:
    by_rank: dict[int, list[float]] = {}
    for run in group.timed:
        for rank in run.timing.ranks if run.timing is not None else ():
            by_rank.setdefault(rank.rank, []).append(rank.mean)
    return RankTimes(group.label, by_rank)


@dataclass(frozen=True, slots=True)
class RankWork:
    """Time and work of one rank. The first iteration is excluded from means."""

    rank: int
    node: int
    mean_seconds: float
    """Per iteration."""
    split: PhaseBreakdown
    """Of one iteration."""
    training_seconds: float
    """All iterations."""
    samples: int
    moved_bytes: float | None
    """Sent and received per iteration; None if the world size changed."""


def rank_work(run: Run) -> list[RankWork]:
    """By rank; empty if iterations were not timed."""
    timings = {rank.rank: rank for rank in run.timing.ranks} if run.timing else {}
    splits = breakdown_by_rank(run)
    return [
        RankWork(
            rank,
            int(worker["node"]),
            timing.mean,
            splits[rank],
            timing.total or timing.mean * run.iterations,
            int(worker.get("samples") or 0),
            None if run.is_resized else _moved_bytes(worker) / (timing.count or run.iterations),
        )
        for worker in sorted(run.workers, key=lambda one: int(one["rank"]))
        if (rank := int(worker["rank"])) in splits and (timing := timings.get(rank)) is not None
    ]


def _moved_bytes(worker: dict[str, dict[str, dict[str, float]]]) -> float:
    return math.fsum(
        count.get("bytes_sent", 0) + count.get("bytes_received", 0)
        for count in worker.get("traffic", {}).values()
    )


def mean_rank_work(group: RunGroup) -> list[RankWork]:
    """By rank, mean over the finished runs."""
    by_rank: dict[int, list[RankWork]] = {}
    for run in group.timed:
        for work in rank_work(run):
            by_rank.setdefault(work.rank, []).append(work)
    return [_mean(repeats) for _, repeats in sorted(by_rank.items())]


def _mean(repeats: Sequence[RankWork]) -> RankWork:
    """One rank over several runs."""
    moved = known(one.moved_bytes for one in repeats)
    return RankWork(
        repeats[0].rank,
        repeats[0].node,
        fmean(one.mean_seconds for one in repeats),
        mean_split([one.split for one in repeats]),
        fmean(one.training_seconds for one in repeats),
        round(fmean(one.samples for one in repeats)),
        fmean(moved) if len(moved) == len(repeats) else None,
    )


def compute_balances(group: RunGroup) -> list[float]:
    """Mean compute time over the longest, of each finished run: 1 if all ranks take equally long.

    Each run has its own slowest rank, so balances are not computed from means over runs.
    """
    return [_balance(ranks) for run in group.timed if len(ranks := rank_work(run)) > 1]


def _balance(ranks: Sequence[RankWork]) -> float:
    times = [one.split.of(COMPUTE_PHASES) for one in ranks]
    return math.fsum(times) / len(times) / max(times) if max(times) else 1.0


@dataclass(frozen=True, slots=True)
class FirstRankDifference:
    """Rank 0 against the mean of the other ranks, per iteration."""

    iteration_seconds: float
    """Mean over all ranks."""
    longer_by_phase: dict[str, float]
    """Seconds that rank 0 takes longer; negative where it takes less."""
    moved_bytes: float
    others_moved_bytes: float


def compare_first_rank(ranks: Sequence[RankWork]) -> FirstRankDifference:
    first, others = ranks[0], ranks[1:]
    longer = {
        phase: seconds - math.fsum(one.split.seconds[phase] for one in others) / len(others)
        for phase, seconds in first.split.seconds.items()
    }
    return FirstRankDifference(
        math.fsum(one.split.total for one in ranks) / len(ranks),
        longer,
        first.moved_bytes or 0.0,
        math.fsum(one.moved_bytes or 0.0 for one in others) / len(others),
    )


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
    found = [
        one for run in group.finished if (one := _straggler_in_run(group.label, run)) is not None
    ]
    # Chance, unless it is the same worker in most repeats.
    if not found or len(found) * 2 <= len(group.finished):
        return None
    return found[0] if all(one.rank == found[0].rank for one in found) else None


def _slowed_nodes(run: Run) -> Collection[int]:
    """Nodes of an emulated cluster that get less CPU time than the others."""
    return parse_recorded(run.settings.cluster).slow if run.settings.cluster else ()


def _straggler_in_run(label: str, run: Run) -> Straggler | None:
    splits = breakdown_by_rank(run)
    if len(splits) < 2:
        return None
    computing = {rank: split.of(COMPUTE_PHASES) for rank, split in splits.items()}
    slowest = max(computing, key=lambda rank: computing[rank])
    others = [rank for rank in splits if rank != slowest]
    wait = math.fsum(splits[rank].seconds["wait"] for rank in others) / len(others)
    total = math.fsum(splits[rank].total for rank in others) / len(others)
    usual = median(computing[rank] for rank in others)
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
        is_injected=run.settings.slowness(slowest) > 1 or int(node) in _slowed_nodes(run),
        can_rebalance=run.is_synchronous and run.settings.get("shares") not in (None, ("auto",)),
    )
