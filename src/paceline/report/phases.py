"""Where the time of an iteration goes, and which phase makes one cell slower than another.

The phases of a result are sums over the whole run. Those of an iteration are the ones below, each
over the number of iterations the worker did; its first one is in them, so the time that they are
held against has it too. In a short run it shows that workers also meet after the last iteration:
there the phases are taken as the worker wrote them when that had ended.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.records import PHASES
from paceline.report.cells import Cell
from paceline.report.run import Run
from paceline.report.shape import is_number

IN_ITERATION = ("input", "forward", "backward", "update", "exchange", "wait")
"""Computing first, then what comes of being several."""
COMPUTING = ("input", "forward", "backward", "update")
OUTSIDE = tuple(phase for phase in PHASES if phase not in IN_ITERATION)
TAIL_BYTES = 1_000_000
"""Of a file of events: enough for the last lines of it."""
BESIDE = 0.002
"""More than this of the iterations' time beside them is worth leaving out."""


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
        timing = timings.get(worker["rank"])
        count = (timing.count if timing else 0) or run.iterations
        if count:
            spent = _in_iterations(run, worker, timing.total if timing else 0.0)
            splits[int(worker["rank"])] = Split(
                {key: value / count for key, value in spent.items()}
            )
    return splits


def _in_iterations(run: Run, worker: dict[str, Any], total: float) -> dict[str, float]:
    """A worker's phases up to the end of its last iteration; all of them took `total`."""
    whole = {phase: float(worker["phases"][phase]) for phase in IN_ITERATION}
    spent = math.fsum(whole.values())
    if not total or spent <= (1 + BESIDE) * total:
        return whole
    written = last_phases(run.folder.events_file(int(worker["rank"])))
    if written is None or abs(math.fsum(written.values()) - total) > spent - total:
        return whole
    # What of an exchange was waiting is known only at the end of a run.
    both = whole["exchange"] + whole["wait"]
    meeting = written["exchange"] + written["wait"]
    waiting = meeting * whole["wait"] / both if both else 0.0
    return {**written, "exchange": meeting - waiting, "wait": waiting}


def last_phases(path: Path) -> dict[str, float] | None:
    """The phases of iterations as a worker last wrote them; None where it wrote none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            event = json.loads(line) if b'"phases"' in line else {}
        except ValueError:
            continue
        found = event.get("phases") if isinstance(event, dict) else None
        if isinstance(found, dict) and all(is_number(found.get(phase)) for phase in IN_ITERATION):
            return {phase: float(found[phase]) for phase in IN_ITERATION}
    return None


def of_cell(cell: Cell) -> Split | None:
    """One iteration, on average over the finished runs."""
    splits = [split for run in cell.finished if (split := of_iteration(run)) is not None]
    return _average(splits) if splits else None


def whole_of_cell(cell: Cell) -> Split | None:
    """All the wall time of the workers, on average over them and the finished runs."""
    splits = [of_worker(worker) for run in cell.finished for worker in run.workers]
    return _average(splits) if splits else None


def explain(faster: Cell, slower: Cell) -> Explanation | None:
    """The difference of two cells by phase; None where one has no phases.

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
    if faster.config.global_batch_size != slower.config.global_batch_size:
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
