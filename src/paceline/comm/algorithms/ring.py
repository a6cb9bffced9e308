"""Ring: reduce-scatter, then all-gather, around a ring of ranks.

Each rank sends to its right neighbor and receives from its left neighbor at the same time. The
tensor is split into one chunk per rank. In the first phase (reduce-scatter), every chunk travels
around the ring once, each rank adds its values, and the reduced chunk ends on the rank that owns
it. In the second phase (all-gather), the reduced chunks travel around the ring and each rank keeps
a copy. All links are always busy, and a rank sends less than twice the tensor size for any world
size. However, there are 2 (P - 1) steps, and each adds latency.

Order of summation: the sum of chunk c starts at rank c + 1, moves to the right, and ends at rank c.

`Library` is the communicator's own all-reduce, such as that of gloo or NCCL. Its algorithm is
unknown, so traffic and cost are estimated as for a ring, which is bandwidth-optimal for large
tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.comm.algorithms.base import Algorithm
from paceline.comm.buffers import chunk, chunk_elements
from paceline.comm.cost import Cost, Network

if TYPE_CHECKING:
    from paceline.comm.communicator import Communicator


class Ring(Algorithm):
    def all_reduce(self, communicator: Communicator, tensor: Tensor, kind: str) -> None:
        flat = tensor.view(-1)
        reduce_scatter(communicator, flat, kind)
        all_gather(communicator, flat, kind)

    def bytes_sent(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """Return 2 (P - 1) / P of the tensor size: each phase sends all chunks except one."""
        return reduce_scatter_bytes_sent(
            rank, world_size, elements, element_bytes
        ) + all_gather_bytes_sent(rank, world_size, elements, element_bytes)

    def bytes_received(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """Return the number of bytes that the left neighbor sends."""
        return self.bytes_sent((rank - 1) % world_size, world_size, elements, element_bytes)

    def cost(self, world_size: int, size_bytes: float, network: Network) -> Cost:
        steps = 2 * (world_size - 1)
        moved = steps * size_bytes / world_size
        return Cost(network.seconds(steps, moved, moved / 2), bytes_sent=moved, messages=steps)


def reduce_scatter(communicator: Communicator, flat: Tensor, kind: str) -> None:
    """Reduce chunk `rank` on each rank; its other chunks are left with partial sums."""
    rank, world_size = communicator.rank, communicator.world_size
    buffer = torch.empty_like(chunk(flat, world_size, 0))  # chunk 0 is the largest
    for step in range(1, world_size):
        outgoing = chunk(flat, world_size, (rank - step) % world_size)
        summed = chunk(flat, world_size, (rank - step - 1) % world_size)
        incoming = buffer[: summed.numel()]
        _shift(communicator, outgoing, incoming, kind)
        summed.add_(incoming)


def all_gather(communicator: Communicator, flat: Tensor, kind: str) -> None:
    """Copy chunk `rank` of each rank to all ranks."""
    rank, world_size = communicator.rank, communicator.world_size
    for step in range(world_size - 1):
        outgoing = chunk(flat, world_size, (rank - step) % world_size)
        incoming = chunk(flat, world_size, (rank - step - 1) % world_size)
        _shift(communicator, outgoing, incoming, kind)


def reduce_scatter_bytes_sent(rank: int, world_size: int, elements: int, element_bytes: int) -> int:
    """Return the size of all chunks except this rank's own."""
    return (elements - chunk_elements(elements, world_size, rank)) * element_bytes


def all_gather_bytes_sent(rank: int, world_size: int, elements: int, element_bytes: int) -> int:
    """Return the size of all chunks except the right neighbor's."""
    return (elements - chunk_elements(elements, world_size, rank + 1)) * element_bytes


def _shift(communicator: Communicator, outgoing: Tensor, incoming: Tensor, kind: str) -> None:
    """Send to the right neighbor and receive from the left one."""
    right = (communicator.rank + 1) % communicator.world_size
    left = (communicator.rank - 1) % communicator.world_size
    communicator.sendrecv(outgoing, right, incoming, left, kind).wait()


class Library(Ring):
    """The communicator's own all-reduce, which defines the order of summation."""

    def all_reduce(self, communicator: Communicator, tensor: Tensor, kind: str) -> None:
        communicator.all_reduce(tensor, kind).wait()
