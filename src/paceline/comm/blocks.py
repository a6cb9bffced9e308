"""Tensors that the workers of a host sum where they lie, since everybody sees everybody's.

Worker i sums chunk i over all workers' tensors and writes it back into all of them. So every byte
is read and written once, as in a plain copy, and nothing goes through an outbox.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.algorithms.chunks import chunk
from paceline.comm.arena import Arena, lay_out
from paceline.comm.communicator import Communicator
from paceline.comm.outbox import Collective, Outboxes, add_up
from paceline.comm.staging import copy_flat

CACHED_BYTES = 256 * 1024
"""Summed at once, so that the sum is still in a cache when it is written to the others."""


class Blocks:
    """Equal blocks of one arena, one a worker. Collective."""

    def __init__(self, communicator: Communicator, elements: int, dtype: torch.dtype) -> None:
        begins, size_bytes = lay_out([elements * dtype.itemsize] * communicator.world_size)
        arena = Arena(communicator, size_bytes)
        self._all = [arena.tensor(begin, elements, dtype) for begin in begins]
        self.own = self._all[communicator.rank]

    def everybodys(self, tensor: Tensor) -> list[Tensor] | None:
        """Where each worker has what lies in this worker's block; None if the tensor does not."""
        own = self.own
        begin_byte = tensor.data_ptr() - own.data_ptr()
        is_inside = 0 <= begin_byte <= own.nbytes - tensor.nbytes
        if not is_inside or tensor.dtype != own.dtype or not tensor.is_contiguous():
            return None
        begin = begin_byte // own.element_size()
        return [block[begin : begin + tensor.numel()] for block in self._all]


class AllReduceInPlace(Collective):
    """As one piece, whatever its size: it takes no room in an outbox."""

    def __init__(self, boxes: Outboxes, tensors: Sequence[Tensor]) -> None:
        """The same part of everybody's block."""
        self._tensors = tensors
        super().__init__(boxes, tensors[boxes.rank])

    def elements_in_turn(self) -> int:
        return 1

    def post(self, index: int, box: Tensor) -> None:
        """It is where the others read it."""

    def reduce(self, index: int, boxes: Sequence[Tensor]) -> None:
        chunks = [chunk(tensor, self.world_size, self.rank) for tensor in self._tensors]
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
