"""The gradient noise scale: estimated from squared norms of gradients at two batch sizes.

The gradient of a batch of B samples is that of the loss, G, plus noise of variance V / B, where V
is the variance of the gradient of one sample, summed over all weights. Its squared norm is
therefore |G|^2 + V / B on average. The norms at two batch sizes give V and |G|^2 without bias, and
the noise scale is V / |G|^2, in samples (McCandlish et al. 2018, arXiv 1812.06162). Both are noisy
and the ratio of noisy values is biased, so they are averaged over many steps before the division.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.records import is_number, read_lines

DECAY = 0.99
"""Weight of a measured step, relative to the next one."""
REMEMBERED = 500
"""Measured steps that an estimate is based on; earlier ones would weigh less than 1%."""
MOST_BLOCKS = 25
FEWEST_SAMPLES = 8
"""For an interval."""
_Z = 1.959964
"""The normal quantile of a two-sided 95% interval."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NoiseSample:
    """Squared norms of the gradients of one step, at two batch sizes."""

    iteration: int
    small_batch: float
    """Samples in each of the small batches; their mean if they differ."""
    batch: float
    """Samples in the global batch."""
    small_square: float
    """Mean of the squared norms over the small batches, weighted by their samples."""
    square: float
    """Squared norm of the gradient of the global batch."""

    @property
    def variance(self) -> float:
        """An unbiased estimate of the variance of the gradient of one sample."""
        difference = self.small_square - self.square
        return difference / (1 / self.small_batch - 1 / self.batch)

    @property
    def gradient_square(self) -> float:
        """An unbiased estimate of the squared norm of the gradient without noise."""
        scaled = self.batch * self.square - self.small_batch * self.small_square
        return scaled / (self.batch - self.small_batch)


SAMPLE_KEYS = tuple(item.name for item in fields(NoiseSample))
"""Keys of the event `gradient_noise`, each with one value per measured step."""


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """An estimate with its 95% confidence interval; in samples."""

    value: float | None
    """None if the estimate of the gradient without noise is not positive."""
    low: float | None
    high: float | None
    """None if the interval has no upper end, and both if there are too few measurements."""
    variance: float
    gradient_square: float
    batch: float
    """Samples in the global batch."""
    small_batch: float
    measurements: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_noise_samples(path: Path, until: float = math.inf) -> list[NoiseSample]:
    """Return the samples of the iterations before `until` in the events of rank 0.

    Of iterations that a resumed run repeated, the last ones count. Skips malformed events.
    """
    samples: list[NoiseSample] = []
    for event in read_lines(path):
        if event.get("event") == "gradient_noise":
            found = _samples_of(event)
            first = found[0].iteration if found else math.inf
            del samples[bisect_left(samples, first, key=lambda sample: sample.iteration) :]
            samples += found
    return [sample for sample in samples if sample.iteration < until]


def _samples_of(event: Mapping[str, Any]) -> list[NoiseSample]:
    columns = [event.get(name) for name in SAMPLE_KEYS]
    lists = [column for column in columns if isinstance(column, list)]
    if len(lists) < len(columns) or len({len(column) for column in lists}) != 1:
        return []
    samples = [NoiseSample(*row) for row in zip(*lists, strict=True) if all(map(is_number, row))]
    return [sample for sample in samples if 0 < sample.small_batch < sample.batch]


def estimate(samples: Sequence[NoiseSample], decay: float = DECAY) -> NoiseScale | None:
    """Return the noise scale after the last sample; None without samples.

    Numerator and denominator are exponential moving averages; with a `decay` of 1, means. The
    interval is that of Fieller for a ratio, from the means of consecutive blocks of samples.
    """
    if not samples:
        return None
    variances = np.array([sample.variance for sample in samples])
    squares = np.array([sample.gradient_square for sample in samples])
    weights = decay ** np.arange(len(samples) - 1, -1, -1.0)
    variance = float(np.average(variances, weights=weights))
    square = float(np.average(squares, weights=weights))
    low, high = _fieller(variances, squares, weights)
    return NoiseScale(
        value=max(variance, 0.0) / square if square > 0 else None,
        low=low,
        high=high,
        variance=variance,
        gradient_square=square,
        batch=samples[-1].batch,
        small_batch=samples[-1].small_batch,
        measurements=len(samples),
    )


def learning_rate_factor(
    batch: float, base_batch: float, noise_scale: float, optimizer: str
) -> float:
    """Return the learning rate for a batch size, relative to that for the base batch size.

    For SGD (1 + N / base) / (1 + N / batch) with the noise scale N: linear in the batch size far
    below N (or if N is infinite), constant far above. Others divide gradients by their norm, which
    falls with the noise: its square root.
    """
    factor = batch / base_batch
    if math.isfinite(noise_scale):
        factor *= (base_batch + noise_scale) / (batch + noise_scale)
    return factor if optimizer == "sgd" else math.sqrt(factor)


def _fieller(
    numerators: Floats, denominators: Floats, weights: Floats
) -> tuple[float | None, float | None]:
    """Return the interval of the ratio of two weighted means.

    It has no upper end if the denominator may be 0.
    """
    if len(weights) < FEWEST_SAMPLES:
        return None, None
    starts = np.linspace(0, len(weights), min(MOST_BLOCKS, len(weights)) + 1).astype(int)[:-1]
    totals = np.add.reduceat(weights, starts)
    blocks = np.stack(
        [
            np.add.reduceat(values * weights, starts) / totals
            for values in (numerators, denominators)
        ]
    )
    shares = totals / totals.sum()
    means = blocks @ shares
    deviations = (blocks - means[:, None]) * shares
    concentration = float(shares @ shares)
    quantile = _t_quantile(1 / concentration - 1)
    errors = quantile**2 / (1 - concentration) * (deviations @ deviations.T)
    # The ratios r for which (numerator - r * denominator)^2 is within the error of the difference.
    a, b, c = (float(means[i] * means[j] - errors[i, j]) for i, j in ((1, 1), (0, 1), (0, 0)))
    discriminant = b * b - a * c
    if discriminant < 0 or a == 0:
        return 0.0, None
    roots = sorted((b + sign * math.sqrt(discriminant)) / a for sign in (-1, 1))
    if a > 0:
        return max(roots[0], 0.0), max(roots[1], 0.0)
    # All ratios but those between the roots: if the first is positive, some below it, too.
    return 0.0 if roots[0] > 0 else max(roots[1], 0.0), None


def _t_quantile(degrees: float) -> float:
    """Return the quantile of Student's t for a two-sided 95% interval, to 1% from 4 degrees on."""
    z = _Z
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
