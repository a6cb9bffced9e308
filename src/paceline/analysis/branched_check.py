"""What batch sizes cost, by branches from one checkpoint: a check of the gradient noise scale.

launch/branches.py trains the branches. Each needs some number of samples to reach a loss that all
of them reach; the noise scale predicts the ratios of these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.analysis.curves import Floats
from paceline.analysis.noise_scale import relative_samples
from paceline.analysis.run import Run
from paceline.analysis.validation import is_number
from paceline.errors import RecordsError
from paceline.records import read_lines


@dataclass(frozen=True, slots=True)
class BranchComparison:
    """One batch size, compared to the base batch size."""

    batch: int
    loss: float
    """Test loss after the last step."""
    samples: float
    """Samples to the loss that all branches reach."""
    relative_samples: float
    predicted_samples: float | None
    """Relative samples by the noise scale; None without one."""


def branched_check(
    branches: Sequence[Run], base_batch: int, noise_scale: float | None = None
) -> list[BranchComparison]:
    """Compare branches by the samples that they need to reach the same test loss.

    One of them has the base batch size. The losses of short branches are noisy: differences of a
    few percent mean nothing.
    """
    curves = {_batch_of(run): _loss_curve(run) for run in branches}
    if base_batch not in curves:
        raise RecordsError(f"no branch has the base batch size {base_batch}: add it")
    common = max(float(losses[-1]) for _, losses in curves.values())
    needed = {batch: samples_to(common, *curve) for batch, curve in curves.items()}
    return [
        BranchComparison(
            batch=batch,
            loss=float(curves[batch][1][-1]),
            samples=needed[batch],
            relative_samples=needed[batch] / needed[base_batch],
            predicted_samples=None
            if noise_scale is None
            else relative_samples(batch, noise_scale, base_batch),
        )
        for batch in sorted(curves)
    ]


def samples_to(loss: float, samples: Floats, losses: Floats) -> float:
    """Samples to a loss, interpolated between the evaluations before and after it."""
    index = int(np.argmax(losses <= loss))
    if index == 0:
        return float(samples[0])
    fraction = (losses[index - 1] - loss) / (losses[index - 1] - losses[index])
    return float(samples[index - 1] + fraction * (samples[index] - samples[index - 1]))


def _batch_of(run: Run) -> int:
    if run.settings.config is None:
        raise RecordsError(f"{run.folder.path} is not a branch: it has no batch size")
    return run.settings.config.global_batch_size


def _loss_curve(run: Run) -> tuple[Floats, Floats]:
    """Samples since the checkpoint, and the lowest test loss up to there, of each evaluation."""
    starts = (one for one in read_lines(run.folder.events_file(0)) if one.get("event") == "start")
    first = next((one["iteration"] for one in starts if is_number(one.get("iteration"))), 0)
    points = [
        (entry["iteration"] - first, entry["test_loss"])
        for entry in run.history
        if is_number(entry.get("test_loss"))
    ]
    if not points:
        raise RecordsError(f"{run.folder.path} has no evaluation: train a longer branch")
    steps, losses = np.array(points, dtype=np.float64).T
    return steps * _batch_of(run), np.minimum.accumulate(losses)
