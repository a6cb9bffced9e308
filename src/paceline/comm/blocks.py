"""Tensors that the workers of a host sum where they lie, since everybody sees everybody's.

Worker i sums chunk i over all workers' tensors and writes it back into all of them. So every byte
is read and written once, as in a plain copy, and nothing goes through an outbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.algorithms.chunks import chunk
from paceline.comm.arena import LINE_BYTES, Arena, lay_out
from paceline.comm.communicator import Communicator
from paceline.comm.outbox import PIECES, Collective, Outboxes, add_up
from paceline.comm.staging import copy_flat
from paceline.errors import RunError

CACHED_BYTES = 256 * 1024
"""Summed at once, so that the sum is still in a cache when it is written to the others."""
NUMBERS_A_LINE = LINE_BYTES // 8


class Part(NamedTuple):
    """The same part of everybody's block."""

    tensors: list[Tensor]
    begin: int
    notes: memoryview
    """Of the blocks: for each worker and piece under way, a line that says what it sums."""


class Blocks:
    """Equal blocks of one arena, one a worker. Collective; `RunError` where they are not equal."""

    def __init__(self, communicator: Communicator, elements: int, dtype: torch.dtype) -> None:
        world_size = communicator.world_size
        _check_that_all_ask_for(elements * dtype.itemsize, communicator)
        notes_bytes = world_size * PIECES * LINE_BYTES
        (*begins, notes), size_bytes = lay_out(
            [*[elements * dtype.itemsize] * world_size, notes_bytes]
        )
        arena = Arena(communicator, size_bytes)
        self._all = [arena.tensor(begin, elements, dtype) for begin in begins]
        self._notes = arena.numbers(notes, notes_bytes)
        self.own = self._all[communicator.rank]

    def everybodys(self, tensor: Tensor) -> Part | None:
        """Where each worker has what lies in this worker's block; None if the tensor does not."""
        own = self.own
        begin_byte = tensor.data_ptr() - own.data_ptr()
        is_inside = 0 <= begin_byte <= own.nbytes - tensor.nbytes
        if not is_inside or tensor.dtype != own.dtype or not tensor.is_contiguous():
            return None
        begin = begin_byte // own.element_size()
        tensors = [block[begin : begin + tensor.numel()] for block in self._all]
        return Part(tensors, begin, self._notes)


def _check_that_all_ask_for(size_bytes: int, communicator: Communicator) -> None:
    sizes = torch.zeros(communicator.world_size, dtype=torch.int64)
    sizes[communicator.rank] = size_bytes
    communicator.all_reduce(sizes, "control").wait()
    asked = sizes.tolist()
    if min(asked) < max(asked):
        raise RunError(
            f"zeros: rank {asked.index(max(asked))} asks for {max(asked):,} bytes and rank"
            f" {asked.index(min(asked))} for {min(asked):,}: all ranks are to ask for the same"
        )


class AllReduceInPlace(Collective):
    """As one piece, whatever its size: it takes no room in an outbox."""

    def __init__(self, boxes: Outboxes, part: Part) -> None:
        self._part = part
        super().__init__(boxes, part.tensors[boxes.rank])
        # With the piece's number, since a rank that sums something else leaves an old note here.
        self._note = [self._first, part.begin, self.flat.numel()]

    def elements_in_turn(self) -> int:
        return 1

    def post(self, index: int, box: Tensor) -> None:
        """It is where the others read it; which part it is, they are told."""
        for place, number in enumerate(self._note, self._place(self.rank)):
            self._part.notes[place] = number

    def _place(self, rank: int) -> int:
        """Of a rank's note on this piece."""
        return (rank * PIECES + self._first % PIECES) * NUMBERS_A_LINE

    def _check_that_all_sum_the_same(self) -> None:
        for rank in range(self.world_size):
            place = self._place(rank)
            if self._part.notes[place : place + len(self._note)].tolist() != self._note:
                raise RunError(
                    f"all_reduce: ranks {self.rank} and {rank} sum different parts of what zeros"
                    " gave them: all ranks are to give the same part, in the same order"
                )

    def reduce(self, index: int, boxes: Sequence[Tensor]) -> None:
        self._check_that_all_sum_the_same()
        chunks = [chunk(tensor, self.world_size, self.rank) for tensor in self._part.tensors]
        step = CACHED_BYTES // self.flat.element_size()
        for begin in range(0, chunks[0].numel(), step):
            parts = [each[begin : begin + step] for each in chunks]
            own = parts[self.rank]
            # In the order of the ranks, but for the first to be read, which is where the sum lies.
            add_up([own, *(part for part in parts if part is not own)], own)
            for part in parts:
                if part is not own:
                    copy_flat(part, own)

    def take(self, index: int, boxes: Sequence[Tensor]) -> None:
        """The others have written it here."""
