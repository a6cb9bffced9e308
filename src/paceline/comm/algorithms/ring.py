"""Ring: the tensor travels around a ring in chunks, once to be summed and once to be handed out.

Each rank sends to its right and receives from its left, both at once. The tensor is cut into one
chunk a rank. In the first half (reduce-scatter) every chunk goes once around, and each rank adds
its part as the chunk comes by; the chunk ends, complete, at the rank it belongs to. In the second
half
(all-gather) the complete chunks go around, and each rank keeps a copy. Every link is busy all the
time and nobody sends more than twice the tensor, however many workers there are; but there are
2 (P - 1) steps, each with its latency.

Order of the sum: chunk c starts at rank c + 1 and collects the ranks to the right in turn; rank c
comes last.

Library: whatever the communicator's own all-reduce does.

Gloo runs a ring; NCCL picks a ring or a tree by size and topology; the in-process communicator runs
ring.py. What a library does inside cannot be counted from outside, so its traffic is counted as a
ring's and its cost is a ring's too: the least that an all-reduce of a large tensor can move.

Order of the sum: the library's own."""

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
        """2 (P - 1) / P of the tensor: each half of the ring leaves one chunk out."""
        return reduce_scatter_bytes_sent(
            rank, world_size, elements, element_bytes
        ) + all_gather_bytes_sent(rank, world_size, elements, element_bytes)

    def bytes_received(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """What its left neighbour sends."""
        return self.bytes_sent((rank - 1) % world_size, world_size, elements, element_bytes)

    def cost(self, world_size: int, size_bytes: float, network: Network) -> Cost:
        steps = 2 * (world_size - 1)
        moved = steps * size_bytes / world_size
        return Cost(network.seconds(steps, moved, moved / 2), bytes_sent=moved, messages=steps)


def reduce_scatter(communicator: Communicator, flat: Tensor, kind: str) -> None:
    """Leave the sum of chunk `rank` on each rank, and partial sums in its other chunks."""
    rank, world_size = communicator.rank, communicator.world_size
    buffer = torch.empty_like(chunk(flat, world_size, 0))  # chunk 0 is as large as any
    for step in range(1, world_size):
        outgoing = chunk(flat, world_size, (rank - step) % world_size)
        summed = chunk(flat, world_size, (rank - step - 1) % world_size)
        arriving = buffer[: summed.numel()]
        _pass_on(communicator, outgoing, arriving, kind)
        summed.add_(arriving)


def all_gather(communicator: Communicator, flat: Tensor, kind: str) -> None:
    """Give every rank the chunks of all; each begins with its own."""
    rank, world_size = communicator.rank, communicator.world_size
    for step in range(world_size - 1):
        outgoing = chunk(flat, world_size, (rank - step) % world_size)
        arriving = chunk(flat, world_size, (rank - step - 1) % world_size)
        _pass_on(communicator, outgoing, arriving, kind)


def reduce_scatter_bytes_sent(rank: int, world_size: int, elements: int, element_bytes: int) -> int:
    """All chunks but its own."""
    return (elements - chunk_elements(elements, world_size, rank)) * element_bytes


def all_gather_bytes_sent(rank: int, world_size: int, elements: int, element_bytes: int) -> int:
    """All chunks but the one that its right neighbour began with."""
    return (elements - chunk_elements(elements, world_size, rank + 1)) * element_bytes


def _pass_on(communicator: Communicator, outgoing: Tensor, arriving: Tensor, kind: str) -> None:
    right = (communicator.rank + 1) % communicator.world_size
    left = (communicator.rank - 1) % communicator.world_size
    communicator.sendrecv(outgoing, right, arriving, left, kind).wait()


class Library(Ring):
    def all_reduce(self, communicator: Communicator, tensor: Tensor, kind: str) -> None:
        communicator.all_reduce(tensor, kind).wait()
