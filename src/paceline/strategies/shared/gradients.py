"""Exchange and summation of gradients in the shared memory of a host.

`PublishedGradients` copies gradients to shared memory, except those that the rank sums itself.
`InPlaceGradients` is for small models, for which the overhead of copying and summing each tensor
exceeds the transfer time: backward passes write to shared memory, and summation takes one addition
per rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.comm.buffers import memcpy
from paceline.errors import RunError
from paceline.measure.gradient_noise import GradientNoise
from paceline.strategies.flat_buffer import FlatBuffer
from paceline.strategies.replica import Replica
from paceline.strategies.sharded import ParameterShard
from paceline.strategies.shared.linear_factors import LinearGradientFactors

EARLY_PUBLISH_BYTES = 2**20
"""Gradients of at least this size are published during the backward pass."""


class SharedGradients(Protocol):
    """Gradients of one rank in the shared memory of its host."""

    def publish(self) -> int:
        """Make this rank's gradients readable by other ranks; returns the bytes they will read."""

    def measure_own(self, noise: GradientNoise) -> None:
        """Measure this rank's gradients, between `publish` and `reduce`."""

    def reduce(self) -> int:
        """Sum this rank's shard, after all ranks have published; returns the bytes read."""

    def drop_sums(self) -> None:
        """Release the sums after the update."""

    def reset(self) -> None:
        """Prepare for the next step, after all ranks have read the gradients."""

    def detach(self) -> None:
        """Remove hooks and shared gradients from the model."""


class InPlaceGradients:
    """Gradients of a model that local rank 0 updates alone."""

    def __init__(
        self, weights: Sequence[nn.Parameter], buffers: Sequence[FlatBuffer], local_rank: int
    ) -> None:
        """`buffers` holds the gradients of all ranks, by local rank."""
        self._is_read = local_rank > 0
        self._own = buffers[local_rank].tensor
        self._others = [buffer.tensor for rank, buffer in enumerate(buffers) if rank != local_rank]
        self._views = [
            (weight, view)
            for weight, view in zip(weights, buffers[local_rank].views, strict=True)
            if weight.requires_grad
        ]
        self._gradient_bytes = sum(view.nbytes for _, view in self._views)
        for weight, view in self._views:
            weight.grad = view

    def publish(self) -> int:
        for weight, view in self._views:
            # User code may have replaced or removed the view.
            if weight.grad is not view:
                if weight.grad is None:
                    view.zero_()
                else:
                    view.copy_(weight.grad)
                weight.grad = view
        return self._gradient_bytes if self._is_read else 0

    def measure_own(self, noise: GradientNoise) -> None:
        noise.add_own([self._own])

    def reduce(self) -> int:
        for other in self._others:
            self._own.add_(other)
        return len(self._others) * self._gradient_bytes

    def drop_sums(self) -> None:
        """Do nothing: `reset` clears the sums together with the gradients."""

    def reset(self) -> None:
        self._own.zero_()

    def detach(self) -> None:
        for weight, _ in self._views:
            weight.grad = None


class PublishedGradients:
    """Gradients that are copied to shared memory when they are complete."""

    def __init__(
        self,
        replica: Replica,
        weights: Sequence[nn.Parameter],
        shards: Sequence[ParameterShard],
        buffers: Sequence[FlatBuffer],
        local_rank: int,
        factored: Mapping[int, LinearGradientFactors],
        *,
        sums_are_contiguous: bool,
    ) -> None:
        """`buffers` holds the gradients of all ranks by local rank; this rank sums `shards`.

        `factored` maps indices of weights to their factors; these weights usually have no gradient.
        Sums overwrite this rank's own gradients or, if `sums_are_contiguous`, its shared buffer.
        """
        own = buffers[local_rank]
        others = [rank for rank in range(len(buffers)) if rank != local_rank]
        self._replica = replica
        self._sums_are_contiguous = sums_are_contiguous
        self._factored = list(factored.values())
        self._owned = [
            _OwnedShard(
                shard,
                weights[shard.weight],
                _elements_of(own, shard.weight, shard.elements),
                {
                    rank: _elements_of(buffers[rank], shard.weight, shard.elements)
                    for rank in others
                },
                factored.get(shard.weight),
            )
            for shard in shards
        ]
        owned = {shard.weight: shard.elements for shard in shards}
        self._published: list[_PublishedGradient] = []
        for index, weight in enumerate(weights):
            parts = _outside(weight, owned.get(index, slice(0, 0)))
            if weight.requires_grad and others and parts:
                targets = [(part, _elements_of(own, index, part)) for part in parts]
                self._published.append(
                    _PublishedGradient(weight, targets, index in owned, index in factored)
                )
        # Large gradients are published during the backward pass. Those that this rank does not sum
        # are then freed, which reduces peak memory.
        self._hooks: list[RemovableHandle] = [
            published.weight.register_post_accumulate_grad_hook(
                partial(_publish_early, replica, published)
            )
            for published in self._published
            if published.weight.nbytes >= EARLY_PUBLISH_BYTES
        ]

    def publish(self) -> int:
        published_bytes = 0
        for published in self._published:
            if not published.is_done:
                published.copy()
            published.is_done = False
            published_bytes += published.copied_bytes
        for factored in self._factored:
            factored.publish()
            published_bytes += factored.published_bytes
        return published_bytes

    def measure_own(self, noise: GradientNoise) -> None:
        published = [one for one in self._published if not one.is_factored]
        parts = [target for one in published for _, target in one.targets]
        parts += [own for owned in self._owned if (own := owned.unfactored()) is not None]
        if parts:
            noise.add_own(parts)
        for factored in self._factored:
            noise.add_own_square(factored.square())

    def reduce(self) -> int:
        for owned in self._owned:
            total = owned.reduce()
            owned.shard.values.grad = (
                owned.buffer.copy_(total) if self._sums_are_contiguous else total
            )
        return sum(owned.read_bytes() for owned in self._owned)

    def drop_sums(self) -> None:
        for owned in self._owned:
            owned.shard.values.grad = None

    def reset(self) -> None:
        for factored in self._factored:
            factored.reset()
        self._replica.clear_gradients()

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for factored in self._factored:
            factored.detach()


@dataclass(frozen=True, slots=True)
class _OwnedShard:
    """A shard of a weight's gradient that this rank sums."""

    shard: ParameterShard
    weight: nn.Parameter
    buffer: Tensor
    """The shard in this rank's shared memory, which no other rank reads."""
    others: dict[int, Tensor]
    """The shard in the other ranks' gradients, by local rank."""
    factored: LinearGradientFactors | None

    def reduce(self) -> Tensor:
        elements = self.shard.elements
        own = None if self.weight.grad is None else _in_memory_order(self.weight)[elements]
        if self.factored is None:
            total = self.buffer.zero_() if own is None else own
        else:
            total = self.factored.multiply(elements)
            if own is not None:
                total.add_(own)
        for other in self._unfactored():
            total.add_(other)
        return total

    def unfactored(self) -> Tensor | None:
        """Return the shard of this rank's own gradient; None if it has none or factors."""
        if self.factored is not None or self.weight.grad is None:
            return None
        return _in_memory_order(self.weight)[self.shard.elements]

    def read_bytes(self) -> int:
        read_bytes = sum(other.nbytes for other in self._unfactored())
        if self.factored is not None:
            read_bytes += self.factored.read_bytes(self.shard.elements, self.others)
        return read_bytes

    def _unfactored(self) -> list[Tensor]:
        """Return the gradients that other ranks published without factors."""
        return [
            other
            for rank, other in self.others.items()
            if self.factored is None or self.factored.has_gradient(rank)
        ]


@dataclass(slots=True)
class _PublishedGradient:
    """A gradient that other ranks sum, in whole or in part."""

    weight: nn.Parameter
    targets: list[tuple[slice, Tensor]]
    """Ranges of elements, and the shared memory to copy them to."""
    is_owned: bool
    """Whether this rank sums another part of the gradient."""
    is_factored: bool
    is_done: bool = False
    copied_bytes: int = 0

    def copy(self) -> None:
        self.copied_bytes = 0
        if self.weight.grad is None and self.is_factored:
            return
        gradient = None if self.weight.grad is None else _in_memory_order(self.weight)
        for elements, target in self.targets:
            if gradient is None:
                target.zero_()
            else:
                memcpy(target, gradient[elements])
            self.copied_bytes += target.nbytes


def _publish_early(replica: Replica, published: _PublishedGradient, weight: Tensor) -> None:
    if replica.is_last_microbatch:
        if published.is_done:
            raise RunError(
                "--strategy shared: a weight received a second gradient in one step, from another"
                " backward pass or from reentrant checkpointing of a layer that is used twice:"
                " use --strategy allreduce"
            )
        published.copy()
        published.is_done = True
        if not published.is_owned and not published.is_factored:
            weight.grad = None


def _outside(weight: nn.Parameter, owned: slice) -> list[slice]:
    """Return the elements of a weight before and after the owned ones."""
    parts = (slice(0, owned.start), slice(owned.stop, weight.numel()))
    return [part for part in parts if part.start < part.stop]


def _in_memory_order(weight: nn.Parameter) -> Tensor:
    """Return the flat gradient in the memory order of the weight; copies it if strides differ."""
    gradient = weight.grad
    assert gradient is not None
    if gradient.stride() != weight.stride():
        gradient = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype).copy_(
            gradient
        )
    return gradient.as_strided((weight.numel(),), (1,))


def _elements_of(buffer: FlatBuffer, weight: int, elements: slice) -> Tensor:
    begin = buffer.offsets[weight]
    return buffer.tensor[begin + elements.start : begin + elements.stop]
