"""The first samples of each epoch: shows whether a run reshuffles its data.

The order is a function of the seed and the epoch, so it is computed from the configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup

MAX_SAMPLES = 8
"""Per epoch."""
_MAX_EPOCHS = 50
_MAX_DATASET_SIZE = 10**8
"""A larger permutation takes too long to compute for a report."""


@dataclass(frozen=True, slots=True)
class SamplingOrder:
    label: str
    first_samples: list[list[int]]
    """Of each epoch that the run began."""
    has_all_epochs: bool = True

    @property
    def distinct(self) -> int:
        return len({tuple(samples) for samples in self.first_samples})


def sampling_order(group: RunGroup) -> SamplingOrder | None:
    """The order of the first finished run; None if its order is unknown."""
    run = group.finished[0]
    config = run.settings.config
    if config is None:
        return None
    samples, epochs = _samples_and_epochs(run, config.train_samples)
    if not 0 < samples <= _MAX_DATASET_SIZE or not epochs:
        return None
    # Imports torch, which most reports do without.
    from paceline.data.sampling import GlobalBatchSampler

    order = GlobalBatchSampler(samples, config.global_batch_size, config.seed, config.reshuffle)
    firsts = [
        order.permutation(epoch)[:MAX_SAMPLES].tolist() for epoch in range(min(epochs, _MAX_EPOCHS))
    ]
    return SamplingOrder(group.label, firsts, has_all_epochs=epochs <= _MAX_EPOCHS)


def _samples_and_epochs(run: Run, train_samples: int | None) -> tuple[int, int]:
    """From the last evaluation; zeros without one."""
    last = run.history[-1] if run.history else None
    if last is None or run.result is None or not last["epoch"]:
        return 0, 0
    samples = train_samples or round(run.result["samples"] / last["epoch"])
    return samples, math.ceil(last["epoch"])
