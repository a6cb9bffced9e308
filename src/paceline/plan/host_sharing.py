"""What workers of one host cost each other: they share its cores, and what cores share.

With more workers, a core has a lower clock rate, less of the cache and of the memory bandwidth, and
may share its execution units with another one. What that costs depends on the machine and on the
model, so it is measured: workers that compute side by side, and do not communicate.

More workers than cores oversubscribe them. While all of them compute, each gets an equal share of
the cores. Where a step ends with a synchronization, some end it later than the others, because the
last ones do not fill all cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import numpy as np

from paceline.errors import RecordsError
from paceline.plan.calibration import Calibration, SideBySide, parse, side_by_side_problems
from paceline.records import SCHEMA, is_number, read_json, write_json

KIND = "side_by_side"
FILE = "side_by_side.json"
"""Beside the runs of a job."""
SLICE_SECONDS = 0.004
"""For how long a worker waits at most while another one computes: a tick of the kernel's scheduler
at 250 Hz, with which it moves a worker to another core, or preempts the other one."""


def write_side_by_side(folder: Path, model: str, points: Sequence[SideBySide]) -> None:
    record = {"schema": SCHEMA, "kind": KIND, "model": model, "points": [*map(asdict, points)]}
    write_json(folder / FILE, record)


def read_side_by_side(folder: Path, model: str) -> tuple[SideBySide, ...]:
    """What was measured beside the runs of a folder; empty if that was nothing, or another model.

    RecordsError if the record is damaged.
    """
    file = folder / FILE
    if not file.is_file():
        return ()
    record = read_json(file)
    if (record.get("kind"), record.get("model")) != (KIND, model):
        return ()
    try:
        points: tuple[SideBySide, ...] = parse(tuple[SideBySide, ...], record.get("points"))
    except (TypeError, ValueError) as error:
        raise RecordsError(f"{file} is damaged: {error}") from None
    problem = next(side_by_side_problems(points), None)
    if problem:
        raise RecordsError(f"{file} is damaged: {problem}")
    return points


class HostSharing:
    """Factors on times, by the number of workers per host."""

    def __init__(self, calibration: Calibration) -> None:
        points = sorted(calibration.side_by_side, key=lambda point: point.workers)
        seconds = [fmean(point.step_seconds) for point in points]
        cores = calibration.hardware.get("cores")
        per_worker = calibration.cores_per_worker or 0.0
        self._share = per_worker / cores if is_number(cores) and cores > 0 else 0.0
        """Of the cores, that a worker needs."""
        self._workers = [point.workers for point in points] or [1]
        # Others do not make a worker faster.
        slowdowns = np.maximum.accumulate([each / seconds[0] for each in seconds] or [1.0])
        self._besides = slowdowns / [*map(self.oversubscription, self._workers)]
        """Slowdowns of the measured numbers of workers, relative to the oversubscription."""

    def oversubscription(self, workers: float) -> float:
        """Of the cores: what their workers need, relative to all cores; at least 1."""
        return max(1.0, workers * self._share)

    def compute(self, workers: float) -> float:
        """Of compute: the oversubscription, times what is measured besides it, linear between
        measured numbers of workers."""
        besides = float(np.interp(workers, self._workers, self._besides))
        return besides * self.oversubscription(workers)

    def late_seconds(self, workers: float, compute_seconds: float, steps: int = 1) -> float:
        """How much later than with equal shares of the cores the last worker ends, per step.

        `compute_seconds` are those of a step with equal shares, `steps` those between two
        synchronizations.
        """
        if workers <= 1:
            return 0.0
        each = self.oversubscription(workers)
        late = (math.ceil(each - 1e-9) / each - 1) * compute_seconds * steps
        return min(max(late, 0.0), SLICE_SECONDS) / steps
