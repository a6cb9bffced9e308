"""The order in which samples came, epoch by epoch: shows a sampler that was not told the epoch.

The order is a function of the seed and the epoch, so the settings of a run tell it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.report.document import Block, Table, Text
from paceline.report.sections.outline import SectionContext

TITLE = "The order of the samples"
MOST_EPOCHS = 4
MOST_SAMPLES = 8
MOST_LOOKED_AT = 50
MOST_TO_SHUFFLE = 10**8


@dataclass(frozen=True, slots=True)
class Orders:
    label: str
    first_samples: list[list[int]]
    """Of each epoch that the run began."""
    is_all: bool = True
    """Whether these are all epochs, and not only the first ones."""

    @property
    def distinct(self) -> int:
        return len({tuple(one) for one in self.first_samples})


def orders(cell: RunGroup) -> Orders | None:
    """Of the first finished run; None where the number of its samples is not known."""
    run = cell.finished[0]
    samples, epochs = _samples_and_epochs(run)
    if not 0 < samples <= MOST_TO_SHUFFLE or not epochs:
        return None
    # Only the few reports that show this pay for loading it.
    from paceline.data.sampling import GlobalBatchSampler

    config = run.config
    order = GlobalBatchSampler(samples, config.global_batch_size, config.seed, config.reshuffle)
    looked_at = range(min(epochs, MOST_LOOKED_AT))
    begins = [order.permutation(epoch)[:MOST_SAMPLES].tolist() for epoch in looked_at]
    return Orders(cell.label, begins, is_all=epochs <= MOST_LOOKED_AT)


def _samples_and_epochs(run: Run) -> tuple[int, int]:
    """As the last evaluation tells."""
    last = run.history[-1] if run.history else None
    if last is None or run.result is None or not last["epoch"]:
        return 0, 0
    samples = run.config.train_samples or round(run.result["samples"] / last["epoch"])
    return samples, math.ceil(last["epoch"])


def build(outline: SectionContext) -> list[Block]:
    if all(cell.config.reshuffle for cell in outline.finished):
        return []
    found = [one for cell in outline.finished if (one := orders(cell)) is not None]
    if not found:
        return []
    rows = [
        (one.label, str(epoch + 1), ", ".join(map(str, samples)))
        for one in found
        for epoch, samples in enumerate(one.first_samples[:MOST_EPOCHS])
    ]
    return [
        Text(answer(found), "answer"),
        Table(("configuration", "epoch", f"its first {MOST_SAMPLES} samples"), rows, words=3),
    ]


def answer(found: Sequence[Orders]) -> str:
    return f"{'; '.join(map(_told, found))}."


def _told(one: Orders) -> str:
    count = len(one.first_samples)
    epochs = f"{count} epoch{'s' * (count != 1)}"
    if not one.is_all:
        epochs = f"the first {epochs}"
    if one.distinct == count:
        return f"{one.label}: each of {epochs} has an order of its own"
    return f"{one.label}: {epochs} in {one.distinct} order{'s' * (one.distinct != 1)}"
