"""Work and time of each rank, and how rank 0 differs from the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.analysis.phases import COMPUTE_PHASES, PhaseBreakdown, breakdown_by_rank, mean_split
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup, known


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
