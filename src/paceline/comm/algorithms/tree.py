"""Tree: the sum climbs a binomial tree to rank 0, and the result comes down the same tree.

In the first round every odd rank sends to the even one before it; in the next, of those left, every
second one sends to the one before it; and so on, so that after log2(P) rounds rank 0 has
everything. Few rounds, but each moves the whole tensor: good for small tensors, where latency is
what counts.

            0
          / | \\
         4  2  1        the tree of eight ranks: a rank's parent
        /|  |           is the rank without its lowest set bit
       6 5  3
       |
       7

Order of the sum: each rank adds its children's sums to its own part, nearest child first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.comm.algorithms.base import Algorithm
from paceline.comm.cost import Cost, Network
from paceline.comm.work import CombinedWork

if TYPE_CHECKING:
    from paceline.comm.communicator import Communicator


class Tree(Algorithm):
    def all_reduce(self, communicator: Communicator, tensor: Tensor, kind: str) -> None:
        flat = tensor.view(-1)
        reduce_to_first(communicator, flat, kind)
        broadcast(communicator, flat, 0, kind)

    def bytes_sent(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """Once up, unless it is the top, and once down to each child."""
        copies = (rank != 0) + len(children(rank, world_size))
        return copies * elements * element_bytes

    def bytes_received(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """Once up from each child, and once down: as much as it sends."""
        return self.bytes_sent(rank, world_size, elements, element_bytes)

    def cost(self, world_size: int, size_bytes: float, network: Network) -> Cost:
        rounds = (world_size - 1).bit_length()
        moved = rounds * size_bytes
        seconds = network.seconds(2 * rounds, 2 * moved, moved)
        return Cost(seconds, bytes_sent=moved, messages=rounds)  # rank 0 has a child a round


def reduce_to_first(communicator: Communicator, flat: Tensor, kind: str) -> None:
    """Leave the sum over all ranks on rank 0, and partial sums on the others."""
    arriving: Tensor | None = None
    for child in children(communicator.rank, communicator.world_size):
        arriving = torch.empty_like(flat) if arriving is None else arriving
        communicator.recv(arriving, child, kind).wait()
        flat.add_(arriving)
    if communicator.rank != 0:
        communicator.send(flat, parent(communicator.rank), kind).wait()


def broadcast(communicator: Communicator, flat: Tensor, root: int, kind: str) -> None:
    """Hand the root's tensor down; ranks are counted from the root, round and round."""
    world_size = communicator.world_size
    place = (communicator.rank - root) % world_size
    if place != 0:
        communicator.recv(flat, (parent(place) + root) % world_size, kind).wait()
    # The farthest child first, since the largest part of the tree hangs below it.
    below = [(child + root) % world_size for child in reversed(children(place, world_size))]
    CombinedWork([communicator.send(flat, child, kind) for child in below]).wait()


def parent(rank: int) -> int:
    return rank & (rank - 1)


def children(rank: int, world_size: int) -> list[int]:
    """The ranks one step below, nearest first."""
    span = rank & -rank or world_size
    distances = (1 << bit for bit in range(world_size.bit_length()))
    return [rank + step for step in distances if step < span and rank + step < world_size]
