"""Gradients in memory that the workers of a host share, and the sum of one worker's chunk of them.

What only this worker sums is never copied: it is read where the backward pass left it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.comm.staging import copy_flat
from paceline.sync.aligned import AlignedMemory
from paceline.sync.factors import Factored
from paceline.sync.own_part import Piece


class Deposits:
    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        pieces: Sequence[Piece],
        memories: Sequence[AlignedMemory],
        place: int,
        factored: Mapping[int, Factored],
    ) -> None:
        """`memories` are all workers', this one's at `place`; `pieces`, what this one sums.

        The weights that are `factored`, by their numbers, mostly have no gradient of their own.
        """
        own = memories[place]
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
            if weight.requires_grad and self._others:
                nothing = slice(0, 0)
                for part in _outside(weight, mine.get(number, nothing)):
                    to = _flat(own, number, part)
                    self._given.append(_Given(weight, part, to, number in factored))

    def give(self) -> int:
        """Put this worker's gradients where the others sum them; how many bytes that were."""
        given_bytes = 0
        for given in self._given:
            if given.weight.grad is not None:
                copy_flat(given.place, _in_memory_order(given.weight)[given.elements])
            elif given.is_factored:
                continue
            else:
                given.place.zero_()
            given_bytes += given.place.nbytes
        for factored in self._factored:
            factored.publish()
            given_bytes += factored.bytes_deposited
        return given_bytes

    def sum_up(self, together: bool) -> None:
        """Sum this worker's pieces, once all others have given theirs, and give each its `grad`.

        The sums lie where this worker's own gradients were; or `together`, in its memory.
        """
        for kept in self._kept:
            total = kept.sum_up()
            kept.piece.values.grad = kept.place.copy_(total) if together else total

    def forget(self) -> None:
        """Let go of the sums."""
        for kept in self._kept:
            kept.piece.values.grad = None

    def clear(self) -> None:
        """Make room for the next factors, once nobody reads these any more."""
        for factored in self._factored:
            factored.clear()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A piece that this worker sums."""

    piece: Piece
    weight: nn.Parameter
    place: Tensor
    """Its own in the shared memory, which no other worker reads."""
    others: dict[int, Tensor]
    """The same elements of the others' gradients, by their places."""
    factored: Factored | None

    def sum_up(self) -> Tensor:
        elements = _elements(self.piece)
        own = None if self.weight.grad is None else _in_memory_order(self.weight)[elements]
        if self.factored is None:
            total = self.place.zero_() if own is None else own
        else:
            total = self.factored.multiply(elements)
            if own is not None:
                total.add_(own)
        for place, other in self.others.items():
            if self.factored is None or self.factored.has_ordinary(place):
                total.add_(other)
        return total


@dataclass(frozen=True, slots=True)
class _Given:
    """Elements of a gradient that another worker sums."""

    weight: nn.Parameter
    elements: slice
    place: Tensor
    is_factored: bool


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


def _elements(piece: Piece) -> slice:
    return slice(piece.begin, piece.begin + piece.values.numel())


def _flat(memory: AlignedMemory, weight: int, elements: slice) -> Tensor:
    begin = memory.offsets[weight]
    return memory.tensor[begin + elements.start : begin + elements.stop]
