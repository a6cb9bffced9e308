"""Where the time of an iteration goes, and which phase makes one cell slower than another.

The phases of a result are sums over the whole run. Those of an iteration are the ones below, each
over the number of iterations the worker did; its first one is in them, so the time that they are
held against has it too. In a short run it shows that workers also meet after the last iteration,
and in a run whose number of workers has changed a sum is of unlike iterations: there the phases are
taken as they were written beside the iterations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.records import PHASES
from paceline.report.cells import Cell
from paceline.report.iterations import IN_ITERATION
from paceline.report.run import Run
from paceline.report.timing import RankTiming

COMPUTING = ("input", "forward", "backward", "update")
BESIDE = 0.002
"""More than this of the iterations' time beside them is worth leaving out."""
OUTSIDE = tuple(phase for phase in PHASES if phase not in IN_ITERATION)


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds by phase, of a worker or on average over several."""

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return math.fsum(self.seconds.values())

    def share(self, phase: str) -> float:
        return self.seconds[phase] / self.total if self.total else 0.0

    def of(self, phases: Sequence[str]) -> float:
        return math.fsum(self.seconds[phase] for phase in phases)


@dataclass(frozen=True, slots=True)
class Explanation:
    """How much longer the same work takes in `slower` than in `faster`, by phase."""

    faster: str
    slower: str
    work: str
    """An iteration; 1,000 samples where the batches differ."""
    seconds: float
    """The difference as the iterations were timed."""
    by_phase: dict[str, float]

    @property
    def explained(self) -> float:
        return math.fsum(self.by_phase.values())

    @property
    def largest(self) -> str:
        """The phase that differs most in the direction of the difference."""
        sign = 1 if self.seconds >= 0 else -1
        return max(self.by_phase, key=lambda phase: sign * self.by_phase[phase])


def of_worker(worker: dict[str, Any]) -> Split:
    """A worker's whole wall time."""
    return Split({phase: float(worker["phases"][phase]) for phase in PHASES})


def of_iteration(run: Run) -> Split | None:
    """One iteration, on average over the run's workers; None where that is not known."""
    splits = by_rank(run)
    return _average(list(splits.values())) if splits else None


def by_rank(run: Run) -> dict[int, Split]:
    """One iteration of each worker."""
    timings = {rank.rank: rank for rank in run.timing.ranks} if run.timing else {}
    splits = {}
    for worker in run.workers:
        rank = int(worker["rank"])
        spent, count = _in_iterations(run, worker, timings.get(rank))
        if count:
            splits[rank] = Split({phase: value / count for phase, value in spent.items()})
    return splits


def _in_iterations(
    run: Run, worker: dict[str, Any], timing: RankTiming | None
) -> tuple[dict[str, float], int]:
    """A worker's phases in its iterations, and the number of these; 0 where they are not known."""
    whole = {phase: float(worker["phases"][phase]) for phase in IN_ITERATION}
    if timing is None or not timing.count or timing.phases is None:
        count = (timing.count if timing else 0) or run.iterations
        return whole, 0 if run.is_resized else count
    spent, written = math.fsum(whole.values()), math.fsum(timing.phases.values())
    beside = spent - timing.total
    is_near = beside <= BESIDE * timing.total or abs(written - timing.total) > beside
    if is_near and not run.is_resized:
        return whole, timing.count
    # What of an exchange was waiting is known only at the end of a run.
    both = whole["exchange"] + whole["wait"]
    meeting = timing.phases["exchange"] + timing.phases["wait"]
    waiting = meeting * whole["wait"] / both if both else 0.0
    return {**timing.phases, "exchange": meeting - waiting, "wait": waiting}, timing.count


def of_cell(cell: Cell) -> Split | None:
    """One iteration, on average over the finished runs."""
    splits = [split for run in cell.finished if (split := of_iteration(run)) is not None]
    return _average(splits) if splits else None


def whole_of_cell(cell: Cell) -> Split | None:
    """All the wall time of the workers, on average over them and the finished runs."""
    splits = [of_worker(worker) for run in cell.finished for worker in run.workers]
    return _average(splits) if splits else None


def explain(faster: Cell, slower: Cell, *, by_samples: bool = False) -> Explanation | None:
    """The difference of two cells by phase, for as many samples where asked or batches differ.

    None where one has no phases.

    Nor where workers did unequal numbers of iterations: a mean over them explains no pace.
    """
    if not all(run.is_in_step for cell in (faster, slower) for run in cell.timed):
        return None
    splits = of_cell(faster), of_cell(slower)
    seconds = _iteration_seconds(faster), _iteration_seconds(slower)
    if splits[0] is None or splits[1] is None or seconds[0] is None or seconds[1] is None:
        return None
    cells = faster, slower
    scales, work = [1.0, 1.0], "an iteration"
    if by_samples or faster.config.global_batch_size != slower.config.global_batch_size:
        scales, work = [1000 / cell.samples_in_iteration for cell in cells], "1,000 samples"
    first, second = splits[0].seconds, splits[1].seconds
    return Explanation(
        faster.label,
        slower.label,
        work,
        seconds[1] * scales[1] - seconds[0] * scales[0],
        {phase: second[phase] * scales[1] - first[phase] * scales[0] for phase in IN_ITERATION},
    )


def _iteration_seconds(cell: Cell) -> float | None:
    """Mean over runs and workers, the first iteration included, as it is in the phases."""
    means = [
        math.fsum(rank.total / rank.count for rank in run.timing.ranks) / len(run.timing.ranks)
        for run in cell.timed
        if run.timing is not None and all(rank.count for rank in run.timing.ranks)
    ]
    return math.fsum(means) / len(means) if means else None


def _average(splits: Sequence[Split]) -> Split:
    return Split(
        {
            phase: math.fsum(split.seconds[phase] for split in splits) / len(splits)
            for phase in splits[0].seconds
        }
    )
