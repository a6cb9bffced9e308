"""A rank's replica of the training state, and the exchange of model state between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.communicator import Communicator
from paceline.comm.connection import Connection
from paceline.measure.gradient_noise import GradientNoise
from paceline.measure.phase_clock import ExposedIntervals, PhaseClock
from paceline.strategies.optimizer_step import (
    FusedSgdStep,
    discard_unscaling,
    lacks_momentum,
    step_unless_overflow,
)
from paceline.strategies.sync_batch_norm import SyncBatchNorm


def broadcast_model(model: nn.Module, communicator: Communicator) -> None:
    """Copy rank 0's weights and buffers to all ranks. Collective."""
    if communicator.world_size > 1:
        _broadcast([weight.data for weight in model.parameters()], communicator, "parameters")
        _broadcast(list(model.buffers()), communicator, "buffers")


def synchronize_buffers(model: nn.Module, communicator: Communicator, how: str) -> None:
    """Synchronize batch-norm statistics for evaluation: rank 0's (`rank0`) or the mean. Collective.

    Ranks see different samples, so their running statistics differ even if weights are equal.
    Counters are always rank 0's.
    """
    buffers = list(model.buffers())
    if communicator.world_size == 1 or not buffers:
        return
    if how == "rank0":
        _broadcast(buffers, communicator, "buffers")
        return
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    if floating:
        flat = torch.cat([buffer.flatten() for buffer in floating])
        communicator.all_reduce(flat, "buffers").wait()
        _copy_back(flat / communicator.world_size, floating)
    _broadcast([each for each in buffers if not each.is_floating_point()], communicator, "buffers")


def _broadcast(tensors: list[Tensor], communicator: Communicator, kind: str) -> None:
    """Broadcast one message per dtype instead of one per tensor."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in same_dtype])
        communicator.broadcast(flat, 0, kind).wait()
        _copy_back(flat, same_dtype)


def _copy_back(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


class ExposedCommunication:
    """Context manager that counts its block as exposed communication, in phase "exchange"."""

    __slots__ = ("_arrived", "_clock", "_phase")

    def __init__(self, clock: PhaseClock, arrived: float | None) -> None:
        self._clock = clock
        self._arrived = arrived

    def __enter__(self) -> None:
        self._phase = self._clock.phase
        self._clock.enter("exchange")

    def __exit__(self, *_: object) -> None:
        self._clock.end_exposed(self._phase, self._arrived)


@dataclass(slots=True)
class Replica:
    """A rank's model, optimizer and communicator, as a strategy uses them."""

    model: nn.Module
    optimizer: Optimizer
    clock: PhaseClock
    forward: Callable[..., Any]
    """The function that the loop calls: the model, possibly compiled or wrapped."""
    scaler: torch.amp.GradScaler
    """Scales fp16 losses; disabled for other precisions."""
    communicator: Communicator
    """Connects all workers; has world size 1 for a single worker."""
    node: int = 0
    """Node rank; workers of one node share its memory."""
    clip_norm: float | None = None
    is_last_microbatch: bool = True
    """Whether the next backward pass is the last one before the update."""
    flat_gradients: Tensor | None = None
    """The flat buffer that contains all gradients, if the strategy uses one."""
    batch_fraction: float = 1.0
    """This rank's fraction of the samples of the current global batch."""
    servers: Sequence[Connection] = ()
    """One connection per parameter server."""
    hidden_exchange_seconds: float = 0.0
    """Communication that overlapped the backward pass."""
    noise: GradientNoise = field(default_factory=GradientNoise)
    """Measures gradients in some steps, if the run does."""
    trainable: list[nn.Parameter] = field(init=False)
    _sync_norms: list[SyncBatchNorm] = field(init=False)
    _step: FusedSgdStep = field(init=False)

    def __post_init__(self) -> None:
        self._step = FusedSgdStep(self.optimizer)
        for weight in self.model.parameters():
            # Flat buffers need weights without gaps in memory.
            if torch.empty_like(weight, device="meta").stride() != weight.stride():
                weight.data = weight.data.contiguous()
        self.trainable = [weight for weight in self.model.parameters() if weight.requires_grad]
        self._sync_norms = [
            layer for layer in self.model.modules() if isinstance(layer, SyncBatchNorm)
        ]
        for layer in self._sync_norms:
            layer.exposed_communication = self.exposed_communication

    def begin_batch(self, samples: int, global_samples: int) -> None:
        """Set how many samples of the global batch this rank computes."""
        self.batch_fraction = samples / global_samples
        self.set_sample_counts(samples > 0)

    def set_sample_counts(self, counts: bool) -> None:
        """Set whether the samples of the next passes count in batch-norm statistics.

        A rank without samples in the batch computes a placeholder, which must not count.
        """
        for layer in self._sync_norms:
            layer.has_samples = counts

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss."""
        self.scaler.scale(loss).backward()

    def exposed_communication(self, arrived: float | None = None) -> ExposedCommunication:
        """Return a context manager for communication that training waits for.

        `arrived`: when it was issued, if that was earlier.
        """
        return ExposedCommunication(self.clock, arrived)

    @property
    def exposed(self) -> ExposedIntervals:
        """Intervals of exposed communication; waits for a GPU to reach their ends."""
        return self.clock.exposed

    def add_overlapped(self, seconds: float) -> None:
        """Add the duration of communication that training did not wait for."""
        # A single worker does not communicate; its intervals measure only thread wake-ups.
        if self.communicator.world_size > 1:
            self.hidden_exchange_seconds += seconds

    def fill_missing_gradients(self) -> None:
        """Set missing gradients of unused weights to zero, as a sum over ranks does.

        The optimizer would otherwise skip these weights for a single worker, but apply weight decay
        and momentum to them for several.
        """
        for weight in self.trainable:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank: the flat buffer that contains them, if there is one.

        They may be summed already.
        """
        if self.flat_gradients is not None:
            return [self.flat_gradients]
        return [weight.grad for weight in self.trainable if weight.grad is not None]

    def update(self) -> None:
        """Clip the gradients, run the optimizer and clear the gradients."""
        self.clock.enter("update")
        if self.noise.is_measuring and self.communicator.rank == 0:
            self.noise.add_summed(self.gradients())
        if self.clip_norm is not None or lacks_momentum(self.optimizer):
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.trainable, self.clip_norm)
        step_unless_overflow(self.scaler, self._step)
        self.scaler.update()
        self.clear_gradients()

    def discard_step(self) -> None:
        """Forget the gradients of a step that did not run."""
        self.clear_gradients()
        discard_unscaling(self.scaler)

    def clear_gradients(self) -> None:
        if self.flat_gradients is None:
            for weight in self.trainable:
                weight.grad = None
        else:
            # Gradients must remain views of the flat buffer.
            self.flat_gradients.zero_()
