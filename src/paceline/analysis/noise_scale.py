"""The gradient noise scale of a run over time, and what it predicts for other batch sizes.

By McCandlish et al. 2018 (arXiv 1812.06162), training to a loss with batch size B takes
S (1 + N / B) steps and E (1 + B / N) samples, where N is the noise scale, and S and E are the
numbers of steps and samples that no batch size can go below. The rule assumes that the learning
rate is tuned for each batch size, and that N at one batch size holds for the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.analysis.curves import Curve, Floats, edges
from paceline.analysis.run import Run
from paceline.measure.noise_scale import (
    MOST_BLOCKS,
    REMEMBERED,
    NoiseSample,
    NoiseScale,
    estimate,
    read_noise_samples,
)

MAX_POINTS = 100
"""Of a curve: it is smooth, and each point takes as long as an estimate."""
BLOCK_SAMPLES = 5
"""Measured steps whose mean squared norm is precise enough to divide by."""


@dataclass(frozen=True, slots=True)
class NoiseCurve:
    """The smoothed noise scale over time, in samples; points without an estimate are left out."""

    iterations: Floats
    values: Floats
    low: Floats
    """Lower end of the 95% confidence interval; NaN if there are too few measurements."""
    high: Floats
    """Upper end; infinite if the interval has none."""

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


def whole_run(samples: Sequence[NoiseSample]) -> NoiseScale | None:
    """The noise scale that predicts the steps of a whole run, during which it changes.

    A step with batch size b does as much as |G|^2 / (|G|^2 + V / b) of a step with the largest
    batch. To add up such steps and their samples over the run, |G|^2 and V of each measured step
    are divided by |G|^2 + V / b, the mean squared norm of the steps around it.
    """
    bounds = edges(len(samples), min(MOST_BLOCKS, max(1, len(samples) // BLOCK_SAMPLES)))
    scaled: list[NoiseSample] = []
    for start, end in itertools.pairwise(bounds):
        block = samples[start:end]
        square = math.fsum(one.square for one in block) / len(block)
        if square > 0:
            scaled += [
                replace(one, square=one.square / square, small_square=one.small_square / square)
                for one in block
            ]
    return estimate(scaled, decay=1.0)


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
