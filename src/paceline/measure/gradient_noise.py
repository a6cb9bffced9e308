"""Measures squared norms of gradients, before and after their exchange, for the noise scale.

In a measured step, each rank computes the squared norm of its own gradient, and of the summed
gradient or its shard of it. The values stay on the device until ranks coordinate (about once a
second), and travel with the messages of that coordination.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.measure.noise_scale import REMEMBERED, NoiseSample, NoiseScale, estimate

EXACT = (torch.float32, torch.float64)
COLUMNS = 3
"""Values per measured step and rank that are exchanged."""


@dataclass(frozen=True, slots=True)
class _MeasuredStep:
    iteration: int
    samples: int
    """Of the small batch of this rank."""
    global_samples: int
    squares: Tensor
    """Squared norms of this rank's gradient, and of its part of the summed gradient."""


@dataclass(slots=True)
class GradientNoise:
    """Measures every `every`-th step; 0 means none.

    Gradients must be those of losses that are weighted by their samples' fraction of the global
    batch. Bits of gradients and weights do not depend on the measurement.
    """

    every: int = 0
    scaler: torch.amp.GradScaler | None = None
    """The scaler of the gradients; recorded norms are unscaled."""
    reason: str | None = None
    """Why nothing is measured; None if something is."""
    by_microbatch: bool = False
    """Whether the small batches are microbatches of a single rank, instead of the ranks' shards."""
    is_measuring: bool = False
    """Whether the current step is measured."""
    wants_own: bool = False
    """Whether the gradient of this rank's shard is still to be measured in the current step."""
    samples: deque[NoiseSample] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    is_recorded: bool = True
    """Whether this rank records the samples, which are equal on all ranks."""
    unwritten: list[NoiseSample] = field(default_factory=list)
    """Samples that this rank has not recorded yet."""
    _small_batch: int = 0
    _iteration: int = 0
    _global_samples: int = 0
    _own: list[Tensor] = field(default_factory=list)
    _summed: list[Tensor] = field(default_factory=list)
    _loss_scale: Tensor | None = None
    _steps: list[_MeasuredStep] = field(default_factory=list)
    _captured: list[Tensor] | None = None

    def disable(self, reason: str) -> None:
        self.every, self.reason = 0, reason

    def begin_step(self, iteration: int, samples: int, global_samples: int) -> bool:
        """Begin a step; `samples` are those of this rank's small batch.

        Returns whether the step is measured.
        """
        self.is_measuring = self.every > 0 and (iteration + 1) % self.every == 0
        self.wants_own = self.is_measuring and not self.by_microbatch
        # A loop may have skipped the end of the last step.
        self._own, self._summed = [], []
        if self.is_measuring:
            self._iteration, self._global_samples = iteration, global_samples
            self._small_batch = samples
        return self.is_measuring

    def add_own(self, gradients: Sequence[Tensor]) -> None:
        """Measure gradients of this rank, before they are encoded or exchanged."""
        self.add_own_square(sum_of_squares(gradients))

    def add_own_square(self, square: Tensor) -> None:
        """Add the squared norm of a part of this rank's gradient."""
        if not self._own and self.scaler is not None and self.scaler.is_enabled():
            # Without waiting for a GPU, unlike `get_scale`.
            self._loss_scale = self.scaler.scale(square.new_ones(()))
        self._own.append(square)

    def add_summed(self, gradients: Sequence[Tensor]) -> None:
        """Measure summed gradients, of which all ranks together must add each element once."""
        self._summed.append(sum_of_squares(gradients))

    def add_summed_square(self, square: float) -> None:
        """Add the squared norm of summed gradients that another process has measured."""
        self._summed.append(self._own[0].new_tensor(square))

    def end_step(self) -> None:
        """End a measured step."""
        self.is_measuring = self.wants_own = False
        if not self._own:
            return
        nothing = [torch.zeros_like(self._own[0])]
        squares = torch.stack([_sum(self._own), _sum(self._summed or nothing)])
        if self._loss_scale is not None:
            squares /= self._loss_scale**2
        self._own, self._summed, self._loss_scale = [], [], None
        if self._captured is None:
            self._add_step(squares)
        else:
            self._captured.append(squares)

    def _add_step(self, squares: Tensor) -> None:
        self._steps.append(
            _MeasuredStep(self._iteration, self._small_batch, self._global_samples, squares)
        )

    @contextmanager
    def capture(self) -> Iterator[list[Tensor]]:
        """Record the tensors of a step that a `with` block captures in a CUDA graph."""
        captured: list[Tensor] = []
        self._captured = captured
        try:
            yield captured
        finally:
            self._captured, self._own, self._summed, self._loss_scale = None, [], [], None

    def before_replay(self, captured: list[Tensor]) -> None:
        """Do nothing: `replayed` has copied the values of the last replay."""

    def replayed(self, captured: list[Tensor]) -> None:
        """Add a step that was just replayed; the next replay overwrites its values."""
        for squares in captured:
            self._add_step(squares.clone())

    def take(self) -> Tensor:
        """Return the values of this rank since the last call that wait for `add_table`."""
        if not self._steps:
            return torch.empty(0, dtype=torch.float64)
        squares = torch.stack([step.squares for step in self._steps]).double().cpu()
        own = torch.tensor([step.samples for step in self._steps], dtype=torch.float64)
        whole = torch.tensor([step.global_samples for step in self._steps], dtype=torch.float64)
        # The gradient of the loss of a rank is weighted by own / whole. A rank without samples has
        # a gradient of zero.
        unweighted = squares[:, 0] * whole**2 / own.clamp(min=1)
        return torch.stack([unweighted, own, squares[:, 1]], 1).view(-1)

    def add_table(self, table: Tensor) -> None:
        """Add the values of all ranks, one row per rank, each from `take`."""
        steps, self._steps = self._steps, []
        ranks = table.view(len(table), len(steps), COLUMNS)
        totals, parts = ranks.sum(0).tolist(), (ranks[:, :, 1] > 0).sum(0).tolist()
        for step, (own_square, samples, square), count in zip(steps, totals, parts, strict=True):
            # An fp16 gradient may have overflowed, and a small last batch may be on one rank.
            if math.isfinite(own_square + square) and 0 < samples < count * step.global_samples:
                self._add_sample(
                    NoiseSample(
                        iteration=step.iteration,
                        small_batch=samples / count,
                        batch=step.global_samples,
                        small_square=own_square / samples,
                        square=square,
                    )
                )

    def _add_sample(self, sample: NoiseSample) -> None:
        self.samples.append(sample)
        if self.is_recorded:
            self.unwritten.append(sample)

    def estimate(self) -> NoiseScale | None:
        return estimate(self.samples)

    def summary(self) -> dict[str, Any]:
        """Return the entry `noise_scale` of a worker in result.json."""
        found = self.estimate()
        if found is not None:
            return {"every": self.every, "reason": self.reason, **found.to_dict()}
        return {"every": self.every, "reason": self.reason or "no step was measured"}


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, without waiting for a GPU."""
    dense = [each if each.layout is torch.strided else each.coalesce().values() for each in tensors]
    if len(dense) == 1 and dense[0].dim() == 1 and dense[0].dtype in EXACT:
        return torch.dot(dense[0], dense[0])
    # Half precision would overflow.
    dtype = torch.float64 if any(each.dtype is torch.float64 for each in dense) else torch.float32
    return torch.stack(torch._foreach_norm(dense, 2, dtype=dtype)).square_().sum()


def _sum(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(list(values)).sum()
