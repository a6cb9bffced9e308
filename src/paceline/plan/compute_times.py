"""Compute time of a worker by the number of its samples."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceline.errors import MissingMeasurementError
from paceline.plan.calibration import COMPUTE_PHASES, Calibration
from paceline.plan.job import Compute

Floats = NDArray[np.float64]


class ComputeTimes:
    """Compute time of a worker by the number of its samples."""

    def __init__(self, calibration: Calibration, random: np.random.Generator | None = None) -> None:
        """With `random`, times of a bootstrap sample of the measured steps."""
        if not calibration.compute:
            raise MissingMeasurementError("compute time", "a run with one worker")
        points = sorted(calibration.compute, key=lambda point: point.samples)
        self.samples = np.array([float(point.samples) for point in points])
        factors = []
        for point in points:
            steps = np.asarray(point.step_seconds)
            factor = 1.0
            if random is not None and len(steps):
                factor = float(random.choice(steps, len(steps)).mean() / steps.mean())
            factors.append(factor)
        self._phases = {
            phase: _ascending(np.array([point.phases[phase] for point in points]) * factors)
            for phase in COMPUTE_PHASES
        }

    def is_measured(self, samples: float) -> bool:
        return bool(self.samples[0] <= samples <= self.samples[-1])

    @property
    def deviation(self) -> float:
        """Relative standard deviation of the measured times from a line: one run may be disturbed.

        0 for fewer than three batches.
        """
        if len(self.samples) < 3:
            return 0.0
        seconds = np.sum([*self._phases.values()], axis=0)
        line = np.polyval(np.polyfit(self.samples, seconds, 1, w=1 / seconds), self.samples)
        return math.sqrt(float(np.sum((seconds / line - 1) ** 2)) / (len(seconds) - 2))

    def at(self, samples: float) -> Compute:
        if len(self.samples) == 1 and samples != self.samples[0]:
            raise MissingMeasurementError(
                f"compute time with other batches than {self.samples[0]:g} samples per worker",
                "a run with another --batch-size",
            )
        return Compute(*(self._phase(self._phases[phase], samples) for phase in COMPUTE_PHASES))

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


def _ascending(seconds: Floats) -> Floats:
    """The nearest values that do not fall (pool adjacent violators): more samples take no less."""
    pools: list[list[float]] = []
    for value in seconds:
        pools.append([float(value)])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return np.array([float(np.mean(pool)) for pool in pools for _ in pool])
