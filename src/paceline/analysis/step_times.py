"""How long the iterations of a run took: exact figures, and curves short enough to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.curves import Curve, Floats, downsample
from paceline.analysis.events import Later, WorkerEvents, read_iterations
from paceline.analysis.statistics import block_means
from paceline.analysis.validation import is_number
from paceline.analysis.world_sizes import WorldSize, starts_of_result, worlds_of
from paceline.records import Result, RunFolder

FIGURES = ("first", "mean", "median", "p95")
"""Of a worker's iterations, as its result has them too."""


@dataclass(frozen=True, slots=True)
class RankStepTimes:
    """Seconds per iteration of one worker; the first iteration is in `first` alone."""

    rank: int
    count: int
    first: float
    mean: float
    median: float
    p95: float
    total: float
    """Of all iterations, the first one too."""
    end: int = 0
    """The iteration after the last one that the worker told of."""
    phases: dict[str, float] | None = None
    """Seconds of the iterations by phase, where these were written."""
    later: Later | None = None
    """The iterations after the first block of events, where their phases were written."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the number of workers has changed, figures are since then and curves of all the run."""

    ranks: list[RankStepTimes]
    mean: float
    """Mean over the workers of each one's, the first iteration left out; so are the next two."""
    median: float
    p95: float
    blocks: list[float]
    """Means of long stretches, for the uncertainty of `mean`."""
    seconds: Curve
    """Mean over the workers, against the iteration, the first one left out."""
    loss: Curve
    """Of the first worker that wrote events, against the iteration."""
    loss_by_time: Curve
    """The same against seconds of training."""
    worlds: list[WorldSize]
    """More than one where the number of workers has changed; none where nobody told it."""
    processes: int
    """That the first worker's iterations took: more than one where the run was resumed."""


def read_timing(folder: RunFolder, result: Result | None) -> StepTimes | None:
    """From the events of all workers; one worker's at a time, to hold little of a long run.

    None where there are none, or none since the number of workers has changed.
    """
    workers = (result or {}).get("workers") or []
    in_step = not any("staleness" in worker for worker in workers)
    last_ranks = {int(worker["rank"]) for worker in workers}
    ranks: list[RankStepTimes] = []
    losses = ends = np.zeros(0)
    worlds: list[WorldSize] = []
    processes = 0
    times: _Times | None = None
    for rank in _ranks_with_events(folder):
        told = read_iterations(folder.events_file(rank))
        if not told.blocks:
            continue
        if times is None:
            worlds = worlds_of(told.starts or starts_of_result(result))
            # Out of step, iterations of a worker are not those of the run.
            times = _Times(told.index, worlds if in_step else [])
            losses, ends = told.losses, np.cumsum(told.seconds)
            processes = told.processes
        times.add(rank, told)
        latest = told.since(worlds[-1].begin) if len(worlds) > 1 else told
        if latest.blocks and (rank in last_ranks or not last_ranks):
            ranks.append(_of_rank(rank, latest))
        # Else it would stay until the next worker's are read.
        del told, latest
    if times is None or not ranks:
        return None
    index, means = times.over_workers()
    latest_means = means[index >= worlds[-1].begin] if len(worlds) > 1 and in_step else means
    return StepTimes(
        ranks=ranks,
        **_over_workers(ranks),
        blocks=block_means(latest_means[1:] if len(latest_means) > 1 else latest_means),
        seconds=downsample(_counted(index[1:]), means[1:]),
        loss=downsample(_counted(times.index), losses, use_mean=True),
        loss_by_time=downsample(ends, losses, use_mean=True),
        worlds=worlds,
        processes=processes,
    )


class _Times:
    """Times of iterations, added up worker by worker."""

    def __init__(self, index: NDArray[np.int64], worlds: Sequence[WorldSize]) -> None:
        """`index`: the iterations of the first worker, which is there as long as the run."""
        self.index = index
        self._begins = np.array([world.begin for world in worlds[1:]], dtype=np.int64)
        self._sizes = np.array([float(world.workers) for world in worlds] or [math.inf])
        self._told = np.zeros(len(self._sizes), dtype=np.int64)
        self._sums = np.zeros(len(index))
        self._counts = np.zeros(len(index), dtype=np.int32)

    def add(self, rank: int, told: WorkerEvents) -> None:
        index, seconds = told.index, told.seconds
        if len(self._sizes) == 1 and np.array_equal(index, self.index):
            self._told += 1
            self._sums += seconds
            self._counts += 1
            return
        worlds = self._worlds(index)
        # A worker that was lost has gone on to where the others no longer had it.
        was_there = self._sizes[worlds] > rank
        self._told[np.unique(worlds[was_there])] += 1
        places = np.searchsorted(self.index, index)
        shared = was_there & (places < len(self.index))
        shared[shared] = self.index[places[shared]] == index[shared]
        self._sums[places[shared]] += seconds[shared]
        self._counts[places[shared]] += 1

    def over_workers(self) -> tuple[NDArray[np.int64], Floats]:
        """The iterations that all their workers told of, and the mean over these."""
        whole = (self._counts > 0) & (self._counts == self._told[self._worlds(self.index)])
        if whole.all():
            return self.index, self._sums / self._counts
        return self.index[whole], self._sums[whole] / self._counts[whole]

    def _worlds(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._begins, index, side="right")


def _of_rank(rank: int, told: WorkerEvents) -> RankStepTimes:
    seconds = told.seconds
    rest = np.sort(seconds[1:]) if len(seconds) > 1 else seconds
    return RankStepTimes(
        rank=rank,
        count=len(seconds),
        first=float(seconds[0]),
        mean=float(rest.mean()),
        median=float(rest[(len(rest) - 1) // 2] + rest[len(rest) // 2]) / 2,
        p95=float(rest[min(len(rest) - 1, round(0.95 * (len(rest) - 1)))]),
        total=float(seconds.sum()),
        end=told.end,
        phases=told.phases(),
        later=told.later(),
    )


def timing_of_result(result: Result) -> StepTimes | None:
    """What the result alone tells, where the events are gone.

    None where the number of workers has changed: its figures are of workers that came and went.
    """
    ranks = [_of_account(worker) for worker in result["workers"] if _is_timed(worker)]
    if not ranks or len(worlds_of(starts_of_result(result))) > 1:
        return None
    empty = downsample(np.zeros(0), np.zeros(0))
    return StepTimes(
        ranks=ranks,
        **_over_workers(ranks),
        blocks=[],
        seconds=empty,
        loss=empty,
        loss_by_time=empty,
        worlds=[],
        processes=1,
    )


def _is_timed(worker: dict[str, Any]) -> bool:
    return all(is_number(worker["iteration_seconds"].get(key)) for key in FIGURES)


def _of_account(worker: dict[str, Any]) -> RankStepTimes:
    figures = {key: worker["iteration_seconds"][key] for key in FIGURES}
    later = worker.get("after_first")
    count = later["iterations"] + 1 if later else 0
    return RankStepTimes(rank=worker["rank"], count=count, total=0.0, **figures)


def _over_workers(ranks: Sequence[RankStepTimes]) -> dict[str, float]:
    return {
        key: math.fsum(getattr(rank, key) for rank in ranks) / len(ranks)
        for key in ("mean", "median", "p95")
    }


def _ranks_with_events(folder: RunFolder) -> list[int]:
    names = (path.stem.partition("-")[2] for path in folder.path.glob("events-*.jsonl"))
    return sorted(int(name) for name in names if name.isdecimal())


def _counted(index: NDArray[np.int64]) -> Floats:
    """Iterations are counted from one where people see them."""
    return index.astype(np.float64) + 1
