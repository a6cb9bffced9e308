"""Gradients of a small model, which the backward pass adds up where another worker reads them.

Copying gradients one by one, and summing them one by one, would take longer than a small model's
bytes are worth. So every gradient is a view of the worker's own part of the shared memory, nothing
is handed over, and one addition a worker sums them all.

Gradients in memory that the workers of a host share, and the sum of one worker's chunk of them.

What only this worker sums is never copied: it is read where the backward pass left it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.comm.buffers import memcpy
from paceline.errors import RunError
from paceline.strategies.flat_buffer import FlatBuffer
from paceline.strategies.replica import Replica
from paceline.strategies.sharded import ParameterShard
from paceline.strategies.shared.linear_factors import LinearGradientFactors


class InPlaceGradients:
    """Gradients of a model that rank 0 updates alone; larger models use `PublishedGradients`."""

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        memories: Sequence[FlatBuffer],
        place: int,
    ) -> None:
        """`memories` are all workers', this one's at `place`."""
        self._is_read = place > 0
        self._own = memories[place].tensor
        self._others = [memory.tensor for number, memory in enumerate(memories) if number != place]
        self._views = [
            (weight, view)
            for weight, view in zip(weights, memories[place].views, strict=True)
            if weight.requires_grad
        ]
        self._gradient_bytes = sum(view.nbytes for _, view in self._views)
        for weight, view in self._views:
            weight.grad = view

    def publish(self) -> int:
        """See that the gradients are where the first worker reads them; how many bytes it reads.

        They are not where somebody has put others in their place, or none.
        """
        for weight, view in self._views:
            if weight.grad is not view:
                if weight.grad is None:
                    view.zero_()
                else:
                    view.copy_(weight.grad)
                weight.grad = view
        return self._gradient_bytes if self._is_read else 0

    def reduce(self) -> int:
        """Add the others' gradients to this worker's own; how many bytes of theirs were read."""
        for other in self._others:
            self._own.add_(other)
        return len(self._others) * self._gradient_bytes

    def drop_sums(self) -> None:
        """The sums go with the gradients."""

    def clear(self) -> None:
        """Begin the next gradients with zeros, once nobody reads these any more."""
        self._own.zero_()

    def release(self) -> None:
        """Leave the weights without gradients, as they were."""
        for weight, _ in self._views:
            weight.grad = None


EARLY_BYTES = 2**20


class PublishedGradients:
    def __init__(
        self,
        replica: Replica,
        weights: Sequence[nn.Parameter],
        pieces: Sequence[ParameterShard],
        memories: Sequence[FlatBuffer],
        place: int,
        factored: Mapping[int, LinearGradientFactors],
        *,
        sums_lie_together: bool,
    ) -> None:
        """`memories` are all workers', this one's at `place`; `pieces`, what this one sums.

        The weights that are `factored`, by their numbers, mostly have no gradient of their own. The
        sums lie where this worker's own gradients were, or all together in its memory.
        """
        own = memories[place]
        self._replica = replica
        self._sums_lie_together = sums_lie_together
        self._others = [number for number in range(len(memories)) if number != place]
        self._factored = list(factored.values())
        self._kept = [
            _Kept(
                piece,
                weights[piece.weight],
                _flat(own, piece.weight, _elements(piece)),
                {
                    other: _flat(memories[other], piece.weight, _elements(piece))
                    for other in self._others
                },
                factored.get(piece.weight),
            )
            for piece in pieces
        ]
        mine = {piece.weight: _elements(piece) for piece in pieces}
        self._given: list[_Given] = []
        for number, weight in enumerate(weights):
            parts = _outside(weight, mine.get(number, slice(0, 0)))
            if weight.requires_grad and self._others and parts:
                places = [(part, _flat(own, number, part)) for part in parts]
                self._given.append(_Given(weight, places, number in mine, number in factored))
        # Large gradients are given as soon as the backward pass has them. Those that this worker
        # sums no part of need not be kept, and so seldom exist all at once.
        self._hooks: list[RemovableHandle] = [
            given.weight.register_post_accumulate_grad_hook(partial(_give_early, replica, given))
            for given in self._given
            if given.weight.nbytes >= EARLY_BYTES
        ]

    def publish(self) -> int:
        """Put this worker's gradients where the others sum them; how many bytes that were."""
        given_bytes = 0
        for given in self._given:
            if not given.is_done:
                given.copy()
            given.is_done = False
            given_bytes += given.copied_bytes
        for factored in self._factored:
            factored.publish()
            given_bytes += factored.bytes_deposited
        return given_bytes

    def release(self) -> None:
        """Leave the layers and weights as they were."""
        for hook in self._hooks:
            hook.remove()
        for factored in self._factored:
            factored.release()

    def reduce(self) -> int:
        """Sum this worker's pieces, once all others have given theirs, and give each its `grad`.

        The number of bytes that were read from the others.
        """
        for kept in self._kept:
            total = kept.reduce()
            kept.piece.values.grad = kept.place.copy_(total) if self._sums_lie_together else total
        return sum(kept.read_bytes() for kept in self._kept)

    def drop_sums(self) -> None:
        """Let go of the sums."""
        for kept in self._kept:
            kept.piece.values.grad = None

    def clear(self) -> None:
        """Make room for the next gradients, once nobody reads these any more."""
        for factored in self._factored:
            factored.clear()
        self._replica.clear_gradients()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A piece that this worker sums."""

    piece: ParameterShard
    weight: nn.Parameter
    place: Tensor
    """Its own in the shared memory, which no other worker reads."""
    others: dict[int, Tensor]
    """The same elements of the others' gradients, by their places."""
    factored: LinearGradientFactors | None

    def reduce(self) -> Tensor:
        elements = _elements(self.piece)
        own = None if self.weight.grad is None else _in_memory_order(self.weight)[elements]
        if self.factored is None:
            total = self.place.zero_() if own is None else own
        else:
            total = self.factored.multiply(elements)
            if own is not None:
                total.add_(own)
        for other in self._ordinary():
            total.add_(other)
        return total

    def read_bytes(self) -> int:
        read_bytes = sum(other.nbytes for other in self._ordinary())
        if self.factored is not None:
            read_bytes += self.factored.read_bytes(_elements(self.piece), self.others)
        return read_bytes

    def _ordinary(self) -> list[Tensor]:
        """What the others have given of it, factors apart."""
        return [
            other
            for place, other in self.others.items()
            if self.factored is None or self.factored.has_ordinary(place)
        ]


@dataclass(slots=True)
class _Given:
    """A gradient of which other workers sum the whole or parts."""

    weight: nn.Parameter
    places: list[tuple[slice, Tensor]]
    """Which elements, and where the others find them."""
    is_kept: bool
    """Whether this worker sums another part of it."""
    is_factored: bool
    is_done: bool = False
    copied_bytes: int = 0

    def copy(self) -> None:
        self.copied_bytes = 0
        if self.weight.grad is None and self.is_factored:
            return
        gradient = None if self.weight.grad is None else _in_memory_order(self.weight)
        for elements, place in self.places:
            if gradient is None:
                place.zero_()
            else:
                memcpy(place, gradient[elements])
            self.copied_bytes += place.nbytes


def _give_early(replica: Replica, given: _Given, weight: Tensor) -> None:
    if replica.is_last_microbatch:
        if given.is_done:
            raise RunError(
                "--strategy shared: a weight received a second gradient in one step, from another"
                " backward pass or from reentrant checkpointing of a layer that is used twice:"
                " use --strategy allreduce"
            )
        given.copy()
        given.is_done = True
        if not given.is_kept and not given.is_factored:
            weight.grad = None


def _outside(weight: nn.Parameter, mine: slice) -> list[slice]:
    """What of a weight lies before and after this worker's piece of it."""
    parts = (slice(0, mine.start), slice(mine.stop, weight.numel()))
    return [part for part in parts if part.start < part.stop]


def _in_memory_order(weight: nn.Parameter) -> Tensor:
    """The gradient's elements in the order of the weight's; a copy only where they differ."""
    gradient = weight.grad
    assert gradient is not None
    if gradient.stride() != weight.stride():
        gradient = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype).copy_(
            gradient
        )
    return gradient.as_strided((weight.numel(),), (1,))


def _elements(piece: ParameterShard) -> slice:
    return slice(piece.begin, piece.begin + piece.values.numel())


def _flat(memory: FlatBuffer, weight: int, elements: slice) -> Tensor:
    begin = memory.offsets[weight]
    return memory.tensor[begin + elements.start : begin + elements.stop]
