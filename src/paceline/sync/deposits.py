"""Gradients in memory that the workers of a host share, and the sum of one worker's chunk of them.

What only this worker sums is never copied: it is read where the backward pass left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.comm.staging import copy_flat
from paceline.sync.aligned import AlignedMemory
from paceline.sync.own_part import Piece


class Deposits:
    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        pieces: Sequence[Piece],
        memories: Sequence[AlignedMemory],
        place: int,
    ) -> None:
        """`memories` are all workers', this one's at `place`; `pieces`, what this one sums."""
        own = memories[place]
        others = [memory for number, memory in enumerate(memories) if number != place]
        self._kept = [
            _Kept(
                piece,
                weights[piece.weight],
                _flat(own, piece.weight, _elements(piece)),
                [_flat(memory, piece.weight, _elements(piece)) for memory in others],
            )
            for piece in pieces
        ]
        mine = {piece.weight: _elements(piece) for piece in pieces}
        self._given: list[_Given] = []
        for number, weight in enumerate(weights):
            if weight.requires_grad and others:
                self._given += _outside(number, weight, own, mine.get(number, slice(0, 0)))
        given_bytes = sum(given.place.nbytes for given in self._given)
        self.counts = {
            "bytes_sent": given_bytes,
            "bytes_received": len(others) * sum(kept.place.nbytes for kept in self._kept),
            "messages": len(others) if given_bytes else 0,
        }
        """What an update moves: the others read what this worker does not sum itself."""

    def give(self) -> None:
        """Put this worker's gradients where the others sum them."""
        for given in self._given:
            copy_flat(given.place, _in_memory_order(given.weight)[given.elements])

    def sum_up(self, together: bool) -> None:
        """Sum this worker's pieces, once all others have given theirs, and give each its `grad`.

        The sums lie where this worker's own gradients were; or `together`, in its memory.
        """
        for kept in self._kept:
            total = _in_memory_order(kept.weight)[_elements(kept.piece)]
            for other in kept.others:
                total.add_(other)
            kept.piece.values.grad = kept.place.copy_(total) if together else total

    def forget(self) -> None:
        """Let go of the sums."""
        for kept in self._kept:
            kept.piece.values.grad = None


@dataclass(frozen=True, slots=True)
class _Kept:
    """A piece that this worker sums."""

    piece: Piece
    weight: nn.Parameter
    place: Tensor
    """Its own in the shared memory, which no other worker reads."""
    others: list[Tensor]
    """The same elements of the others' gradients."""


@dataclass(frozen=True, slots=True)
class _Given:
    """Elements of a gradient that another worker sums."""

    weight: nn.Parameter
    elements: slice
    place: Tensor


def _outside(number: int, weight: nn.Parameter, own: AlignedMemory, mine: slice) -> list[_Given]:
    """What of a weight's gradient lies before and after this worker's piece of it."""
    parts = (slice(0, mine.start), slice(mine.stop, weight.numel()))
    return [
        _Given(weight, part, _flat(own, number, part)) for part in parts if part.start < part.stop
    ]


def _gradient(weight: nn.Parameter) -> Tensor:
    if weight.grad is None:
        raise RuntimeError("a weight has no gradient: nobody filled it in")
    return weight.grad


def _in_memory_order(weight: nn.Parameter) -> Tensor:
    """The gradient's elements in the order of the weight's; a copy only where they differ."""
    gradient = _gradient(weight)
    if gradient.stride() != weight.stride():
        gradient = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype).copy_(
            gradient
        )
    return gradient.as_strided((weight.numel(),), (1,))


def _elements(piece: Piece) -> slice:
    return slice(piece.begin, piece.begin + piece.values.numel())


def _flat(memory: AlignedMemory, weight: int, elements: slice) -> Tensor:
    begin = memory.offsets[weight]
    return memory.tensor[begin + elements.start : begin + elements.stop]
