"""Stragglers: a synchronous step takes as long as that of its slowest worker.

The expected maximum over workers follows from the measured residuals themselves, not from a normal
distribution: the slowest steps of a machine are far slower than a normal distribution says.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BLOCKS = 2000
"""Resampled sums of several steps."""


def expected_maximum(
    residuals: Floats, workers: int, slowdown: float = 1.0, steps: int = 1
) -> float:
    """Expected time of the slowest worker per step, relative to the mean of one worker.

    Residuals are times relative to their mean. `slowdown` multiplies those of one worker. With
    `steps`, workers wait for each other only after that many.
    """
    values = np.sort(residuals if steps == 1 else _means(residuals, steps))
    # P(max <= x) is the product of the workers' distributions; the last one may be slower.
    if slowdown == 1.0:
        below = np.arange(len(values) + 1) / len(values)
        return float(np.dot(values, np.diff(below**workers)))
    support = np.sort(np.concatenate([values, slowdown * values]))
    others = np.searchsorted(values, support, side="right") / len(values)
    slow = np.searchsorted(slowdown * values, support, side="right") / len(values)
    chances = np.diff(np.concatenate([[0.0], others ** (workers - 1) * slow]))
    return float(np.dot(support, chances))


def asynchronous_mean(workers: int, slowdown: float) -> float:
    """Compute time per update of workers that do not wait, relative to that of one worker.

    The rates of the workers add up, and `slowdown` divides that of one of them.
    """
    return workers / (workers - 1 + 1 / slowdown)


def bounded_mean(workers: int, slowdown: float, slowest: float, staleness: int) -> float:
    """As `asynchronous_mean`, of workers that are at most `staleness` steps ahead of each other.

    While the slowest one computes its share of a step, for the expected maximum, the others finish
    that step and `staleness` further ones, and then wait for it.
    """
    return max(asynchronous_mean(workers, slowdown), slowest / (1 + staleness))


def _means(residuals: Floats, steps: int) -> Floats:
    random = np.random.default_rng(0)
    drawn = random.choice(residuals, (BLOCKS, min(steps, 256)))
    means: Floats = drawn.mean(axis=1)
    return means
