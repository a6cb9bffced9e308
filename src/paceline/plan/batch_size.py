"""Recommends a batch size and its learning rate, by the time to the loss of a run.

Time to the loss is steps(B) x step time(B): learning.py predicts the steps from the gradient noise
scale, prediction.py the step time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.plan.learning import Learning
from paceline.plan.prediction import Interval, Prediction

FACTORS = tuple(2.0**power for power in range(-3, 6))
"""Batch sizes to try, relative to that of the run: beyond, its noise scale says little."""


@dataclass(frozen=True, slots=True)
class BatchAdvice:
    batch_size: int
    learning_rate: float | None
    """None if the schedule of the run has several: multiply them by `rate_factor`."""
    rate_factor: float
    steps: float | None
    """To the loss of the run; None if its steps are unknown."""
    seconds: Interval | None
    """To the loss of the run; the ends are those of the step time and of the noise scale."""
    relative_time: Interval | None
    """Time to the loss, relative to the batch size of the run; None if that was not predicted."""
    batch_range: tuple[int, int]
    """The best batch sizes with the ends of the interval of the noise scale."""
    learning: Learning
    """The run that this is based on."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rate_rule": self.learning.rate_rule}


def batch_sizes(learning: Learning, asked: int, workers: int) -> list[int]:
    """Batch sizes to compare: multiples of that of the run, and the one that was asked for."""
    sizes = {round(learning.batch_size * factor) for factor in FACTORS}
    return sorted(size for size in sizes | {asked} if size >= workers)


def advise_batch(
    learning: Learning, best: Prediction, base: Prediction | None, sizes: Sequence[Prediction]
) -> BatchAdvice:
    """Explain the choice of `best`, compared to `base` with the batch size of the run.

    `sizes` has predictions for the same strategy and workers, by batch size.
    """
    batch = best.target.samples
    ends = learning.interval
    steps = [learning.relative_steps(batch, scale) for scale in (None, *ends)]
    time = Interval(
        steps[0] * best.step_seconds.median,
        min(steps) * best.step_seconds.low,
        max(steps) * best.step_seconds.high,
    )
    relative = None
    if base is not None:
        # Errors of the step time are common to both batch sizes.
        ratio = best.step_seconds.median / base.step_seconds.median
        relative = Interval(*(ratio * each for each in (steps[0], min(steps), max(steps))))
    return BatchAdvice(
        batch,
        learning.scaled_rate(batch),
        learning.rate_factor(batch),
        None if learning.steps is None else steps[0] * learning.steps,
        None
        if learning.steps is None
        else Interval(*(learning.steps * each for each in (time.median, time.low, time.high))),
        relative,
        _batch_range(learning, sizes, batch),
        learning,
    )


def _batch_range(learning: Learning, sizes: Sequence[Prediction], batch: int) -> tuple[int, int]:
    found = [batch]
    for scale in learning.interval:
        times = {
            one.target.samples: one.step_seconds.median
            * learning.relative_steps(one.target.samples, scale)
            for one in sizes
        }
        found += [min(times, key=times.__getitem__)] if times else []
    return min(found), max(found)
