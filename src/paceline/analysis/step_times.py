"""Step times of a run: exact statistics, and downsampled curves."""

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
"""Statistics of a worker's iterations, also in its result."""


@dataclass(frozen=True, slots=True)
class RankStepTimes:
    """Seconds per iteration of one worker; only `first` and `total` include the first iteration."""

    rank: int
    count: int
    first: float
    mean: float
    median: float
    p95: float
    total: float
    """Of all iterations."""
    end: int = 0
    """The iteration after the last recorded one."""
    phases: dict[str, float] | None = None
    """Seconds of the iterations by phase; None if not recorded."""
    later: Later | None = None
    """The iterations after the first block of events; None if their phases are not recorded."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """If the world size changed, statistics cover the last one, and curves the whole run."""

    ranks: list[RankStepTimes]
    mean: float
    """Mean over workers, without the first iteration; so are the median and p95."""
    median: float
    p95: float
    blocks: list[float]
    """Means of blocks of iterations, for the uncertainty of `mean`."""
    seconds: Curve
    """Mean over the workers against iteration, without the first one."""
    loss: Curve
    """Of the first worker with events, against iteration."""
    loss_by_time: Curve
    """The same against training time."""
    worlds: list[WorldSize]
    """More than one if the world size changed; empty if it was not recorded."""
    processes: int
    """Of the first worker: more than one if the run was resumed."""


def read_timing(folder: RunFolder, result: Result | None) -> StepTimes | None:
    """From the events of all workers, one at a time to limit memory.

    None without events of the last world size.
    """
    workers = (result or {}).get("workers") or []
    is_synchronous = not any("staleness" in worker for worker in workers)
    last_ranks = {int(worker["rank"]) for worker in workers}
    ranks: list[RankStepTimes] = []
    losses = ends = np.zeros(0)
    worlds: list[WorldSize] = []
    processes = 0
    times: _Times | None = None
    for rank in _ranks_with_events(folder):
        events = read_iterations(folder.events_file(rank))
        if not events.blocks:
            continue
        if times is None:
            worlds = worlds_of(events.starts or starts_of_result(result))
            # In asynchronous runs, iterations of a worker are not those of the run.
            times = _Times(events.index, worlds if is_synchronous else [])
            losses, ends = events.losses, np.cumsum(events.seconds)
            processes = events.processes
        times.add(rank, events)
        latest = events.since(worlds[-1].begin) if len(worlds) > 1 else events
        if latest.blocks and (rank in last_ranks or not last_ranks):
            ranks.append(_of_rank(rank, latest))
        # Free the memory before the next worker is read.
        del events, latest
    if times is None or not ranks:
        return None
    index, means = times.over_workers()
    latest_means = means[index >= worlds[-1].begin] if len(worlds) > 1 and is_synchronous else means
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
    """Sums of iteration times over workers."""

    def __init__(self, index: NDArray[np.int64], worlds: Sequence[WorldSize]) -> None:
        """`index`: the iterations of the first worker, which takes part in the whole run."""
        self.index = index
        self._begins = np.array([world.begin for world in worlds[1:]], dtype=np.int64)
        self._sizes = np.array([float(world.workers) for world in worlds] or [math.inf])
        self._recorded = np.zeros(len(self._sizes), dtype=np.int64)
        self._sums = np.zeros(len(index))
        self._counts = np.zeros(len(index), dtype=np.int32)

    def add(self, rank: int, events: WorkerEvents) -> None:
        index, seconds = events.index, events.seconds
        if len(self._sizes) == 1 and np.array_equal(index, self.index):
            self._recorded += 1
            self._sums += seconds
            self._counts += 1
            return
        worlds = self._worlds(index)
        # A lost worker may have recorded iterations that the others repeated without it.
        was_member = self._sizes[worlds] > rank
        self._recorded[np.unique(worlds[was_member])] += 1
        positions = np.searchsorted(self.index, index)
        shared = was_member & (positions < len(self.index))
        shared[shared] = self.index[positions[shared]] == index[shared]
        self._sums[positions[shared]] += seconds[shared]
        self._counts[positions[shared]] += 1

    def over_workers(self) -> tuple[NDArray[np.int64], Floats]:
        """The iterations that all their workers recorded, and the mean over these."""
        whole = (self._counts > 0) & (self._counts == self._recorded[self._worlds(self.index)])
        if whole.all():
            return self.index, self._sums / self._counts
        return self.index[whole], self._sums[whole] / self._counts[whole]

    def _worlds(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._begins, index, side="right")


def _of_rank(rank: int, events: WorkerEvents) -> RankStepTimes:
    seconds = events.seconds
    rest = np.sort(seconds[1:]) if len(seconds) > 1 else seconds
    return RankStepTimes(
        rank=rank,
        count=len(seconds),
        first=float(seconds[0]),
        mean=float(rest.mean()),
        median=float(rest[(len(rest) - 1) // 2] + rest[len(rest) // 2]) / 2,
        p95=float(rest[min(len(rest) - 1, round(0.95 * (len(rest) - 1)))]),
        total=float(seconds.sum()),
        end=events.end,
        phases=events.phases(),
        later=events.later(),
    )


def timing_of_result(result: Result) -> StepTimes | None:
    """From the result alone, where there are no events.

    None if the world size changed: the figures then mix several world sizes.
    """
    ranks = [_of_worker(worker) for worker in result["workers"] if _is_timed(worker)]
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


def _of_worker(worker: dict[str, Any]) -> RankStepTimes:
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
    """Charts count iterations from one."""
    return index.astype(np.float64) + 1
