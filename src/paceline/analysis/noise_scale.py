"""The gradient noise scale of a run over time, and what it predicts for other batch sizes.

By McCandlish et al. 2018 (arXiv 1812.06162), training to a loss with batch size B takes
S (1 + N / B) steps and E (1 + B / N) samples, where N is the noise scale, and S and E are the
numbers of steps and samples that no batch size can go below. The rule assumes that the learning
rate is tuned for each batch size, and that N at one batch size holds for the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.analysis.curves import Curve, Floats, edges
from paceline.analysis.run import Run
from paceline.measure.noise_scale import REMEMBERED, NoiseSample, estimate, read_noise_samples

MAX_POINTS = 100
"""Of a curve: it is smooth, and each point takes as long as an estimate."""


@dataclass(frozen=True, slots=True)
class NoiseCurve:
    """The smoothed noise scale over time, in samples; points without an estimate are left out."""

    iterations: Floats
    values: Floats
    low: Floats
    """Lower end of the 95% confidence interval; NaN if there are too few measurements."""
    high: Floats
    """Upper end; infinite if the interval has none."""

    @property
    def mean(self) -> float:
        """The mean over the run, which predicts the steps of a whole run."""
        return float(self.values.mean())

    def as_curve(self) -> Curve:
        """The curve and its interval, for a chart; where an end is unknown, the value itself."""
        low = np.where(np.isfinite(self.low), self.low, self.values)
        high = np.where(np.isfinite(self.high), self.high, self.values)
        return Curve(self.iterations, self.values, low, high)


def noise_curve(run: Run) -> NoiseCurve | None:
    """The noise scale of a run over time; None if it was not measured."""
    return curve_of(read_noise_samples(run.folder.events_file(0)))


def curve_of(samples: Sequence[NoiseSample]) -> NoiseCurve | None:
    """The noise scale after every few samples; None without an estimate."""
    rows = []
    for end in edges(len(samples), MAX_POINTS)[1:]:
        found = estimate(samples[max(0, end - REMEMBERED) : end])
        if found is not None and found.value is not None:
            low = math.nan if found.low is None else found.low
            high = math.inf if found.high is None and found.low is not None else found.high
            iteration = samples[end - 1].iteration + 1
            rows.append((iteration, found.value, low, math.nan if high is None else high))
    return NoiseCurve(*np.array(rows, dtype=np.float64).T) if rows else None


def final_noise_scale(run: Run) -> dict[str, Any] | None:
    """The entry `noise_scale` of a result; None for older results and unfinished runs."""
    return next((one["noise_scale"] for one in run.workers if "noise_scale" in one), None)


def relative_steps(batch: float, noise_scale: float, base_batch: float = math.inf) -> float:
    """Steps to reach a loss with a batch size, relative to those with the base batch size.

    Without a base batch size, relative to the fewest steps that any batch size needs.
    """
    return (1 + noise_scale / batch) / (1 + noise_scale / base_batch)


def relative_samples(batch: float, noise_scale: float, base_batch: float = 0.0) -> float:
    """Samples to reach a loss with a batch size, relative to those with the base batch size.

    Without a base batch size, relative to the fewest samples that any batch size needs.
    """
    if noise_scale + base_batch == 0:
        return math.inf
    return (batch + noise_scale) / (base_batch + noise_scale)


def steps_to_loss(steps: float, base_batch: float, batch: float, noise_scale: float) -> float:
    """Steps to a loss that took `steps` steps with the base batch size."""
    return steps * relative_steps(batch, noise_scale, base_batch)
