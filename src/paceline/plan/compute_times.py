"""Compute time of a worker by the number of its samples."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceline.errors import MissingMeasurementError
from paceline.plan.calibration import COMPUTE_PHASES, Calibration
from paceline.plan.host_sharing import HostSharing
from paceline.plan.job import Compute

Floats = NDArray[np.float64]

PHASE_DEVIATION = 0.1
"""Relative standard deviation of a phase between short runs of the same configuration on one
machine: of the compute time of one worker (16 configurations, three runs each), and of exchanges
that are limited by software (16 pairs of runs, docs/results.md#accuracy-of-plans)."""
LEAST_DEVIATION = 0.02
NORMAL_MAD = 1.48
"""Standard deviation of a normal distribution relative to its median absolute deviation."""
COMMON_PHASES = ("input", "forward")
"""Phases that hardly any strategy changes (MeasuredRun.compute_phases)."""
FEWEST_RUNS = 4
"""Fewer runs do not show how much they, or their corrections, differ."""


class ComputeTimes:
    """Compute time of a worker by the number of its samples."""

    def __init__(self, calibration: Calibration, random: np.random.Generator | None = None) -> None:
        """With `random`, times of a bootstrap sample of the measured steps."""
        if not calibration.compute:
            raise MissingMeasurementError("compute time", "a run with one worker")
        self._known: dict[float, Compute] = {}
        of_runs = deviation_of_runs(calibration, HostSharing(calibration))
        self._deviation_of_runs = PHASE_DEVIATION if of_runs is None else of_runs
        points = sorted(calibration.compute, key=lambda point: point.samples)
        self.samples = np.array([float(point.samples) for point in points])
        factors = []
        for point in points:
            steps = np.asarray(point.step_seconds)
            factor = 1.0
            if random is not None and len(steps):
                factor = float(random.choice(steps, len(steps)).mean() / steps.mean())
            factors.append(factor)
        measured = np.array([[point.phases[phase] for phase in COMPUTE_PHASES] for point in points])
        seconds = self._shrunk(measured.T * factors)
        self._phases = dict(zip(COMPUTE_PHASES, map(_ascending, seconds), strict=True))

    def is_measured(self, samples: float) -> bool:
        return bool(self.samples[0] <= samples <= self.samples[-1])

    def _shrunk(self, phases: Floats) -> Floats:
        """Measured times of each phase, drawn towards a line by the samples.

        One run may be disturbed: what runs of the same configuration differ by anyway is no reason
        to leave the line.
        """
        self.deviation = 0.0
        """Relative standard deviation from the line; 0 for fewer than three batches."""
        if len(self.samples) < 3:
            return phases
        total = phases.sum(axis=0)
        lines = np.array([_line(self.samples, phase, 1 / total) for phase in phases])
        errors = (total - lines.sum(axis=0)) / total
        self.deviation = math.sqrt(float(errors @ errors) / (len(errors) - 2))
        kept = max(0.0, 1 - (self._deviation_of_runs / max(self.deviation, 1e-9)) ** 2)
        shrunk: Floats = lines + kept * (phases - lines)
        return shrunk

    def at(self, samples: float) -> Compute:
        if len(self.samples) == 1 and samples != self.samples[0]:
            raise MissingMeasurementError(
                f"compute time with other batches than {self.samples[0]:g} samples per worker",
                "a run with another --batch-size",
            )
        if samples not in self._known:
            phases = (self._phase(self._phases[phase], samples) for phase in COMPUTE_PHASES)
            self._known[samples] = Compute(*phases)
        return self._known[samples]

    def _phase(self, seconds: Floats, samples: float) -> float:
        """Linear between two measured batches, and beyond them by least squares."""
        if len(seconds) == 1 or self.is_measured(samples):
            return float(np.interp(samples, self.samples, seconds))
        slope, _ = np.polyfit(self.samples, seconds, 1, w=1 / np.maximum(self.samples, 1.0))
        slope = max(float(slope), 0.0)
        nearest = 0 if samples < self.samples[0] else -1
        known, measured = float(seconds[nearest]), float(self.samples[nearest])
        # No step has less than no fixed cost, whatever two noisy batches suggest.
        return max(known + slope * (samples - measured), known * min(1.0, samples / measured))


def deviation_of_runs(calibration: Calibration, host: HostSharing) -> float | None:
    """By how much runs with several workers deviate from points of one worker with the same batch.

    Relative, and at least LEAST_DEVIATION; None with too few of them. It is the noise between runs
    and what several workers change besides sharing a host: points are no more exact than that for
    such runs.
    """
    points = {point.samples: point.phases for point in calibration.compute if point.step_seconds}
    logs = []
    for run in calibration.runs:
        if run.workers > 1 and run.samples in points:
            phases = [phase for phase in COMMON_PHASES if phase in run.compute_phases]
            spent, known = (
                math.fsum(source.get(phase, 0.0) for phase in phases)
                for source in (run.phases, points[run.samples])
            )
            if "forward" in phases and min(spent, known) > 0:
                logs.append(math.log(spent / known / host.compute(run.workers / run.hosts)))
    if len(logs) < FEWEST_RUNS:
        return None
    return max(LEAST_DEVIATION, NORMAL_MAD * float(np.median(np.abs(logs))))


def _line(samples: Floats, seconds: Floats, weights: Floats) -> Floats:
    """By least squares; no step takes less than nothing, or less with more samples."""
    slope, offset = np.polyfit(samples, seconds, 1, w=weights)
    squares = weights**2
    if offset < 0:
        slope, offset = np.dot(squares * samples, seconds) / np.dot(squares * samples, samples), 0.0
    if slope < 0:
        slope, offset = 0.0, np.average(seconds, weights=squares)
    line: Floats = offset + slope * samples
    return line


def _ascending(seconds: Floats) -> Floats:
    """The nearest values that do not fall (pool adjacent violators): more samples take no less."""
    pools: list[list[float]] = []
    for value in seconds:
        pools.append([float(value)])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return np.array([float(np.mean(pool)) for pool in pools for _ in pool])
