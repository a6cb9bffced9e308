"""Tree: reduce to rank 0 along a binomial tree, then broadcast along the same tree.

In the first round, every odd rank sends to the even rank before it. In each later round, every
other remaining rank sends to the remaining rank before it. After log2(P) rounds, rank 0 has the
sum. There are few rounds, but each moves the whole tensor. The algorithm is therefore fast for
small tensors, where latency dominates.

            0
          / | \\
         4  2  1        the tree of eight ranks: the parent of a rank
        /|  |           is the rank with its lowest set bit cleared
       6 5  3
       |
       7

Order of summation: each rank adds the sums of its children to its own values, nearest first.
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
        reduce(communicator, flat, kind)
        broadcast(communicator, flat, 0, kind)

    def bytes_sent(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """Return the bytes of one send to the parent, if there is one, and one to each child."""
        copies = (rank != 0) + len(children(rank, world_size))
        return copies * elements * element_bytes

    def bytes_received(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """Return the same number as `bytes_sent`.

        Each edge of the tree carries one message in each direction.
        """
        return self.bytes_sent(rank, world_size, elements, element_bytes)

    def cost(self, world_size: int, size_bytes: float, network: Network) -> Cost:
        rounds = (world_size - 1).bit_length()
        moved = rounds * size_bytes
        seconds = network.seconds(2 * rounds, 2 * moved, moved)
        return Cost(seconds, bytes_sent=moved, messages=rounds)  # rank 0 has one child per round


def reduce(communicator: Communicator, flat: Tensor, kind: str) -> None:
    """Reduce to rank 0; the other ranks are left with partial sums."""
    incoming: Tensor | None = None
    for child in children(communicator.rank, communicator.world_size):
        incoming = torch.empty_like(flat) if incoming is None else incoming
        communicator.recv(incoming, child, kind).wait()
        flat.add_(incoming)
    if communicator.rank != 0:
        communicator.send(flat, parent(communicator.rank), kind).wait()


def broadcast(communicator: Communicator, flat: Tensor, root: int, kind: str) -> None:
    """Broadcast along a binomial tree, in which ranks are numbered relative to the root."""
    world_size = communicator.world_size
    tree_rank = (communicator.rank - root) % world_size
    if tree_rank != 0:
        communicator.recv(flat, (parent(tree_rank) + root) % world_size, kind).wait()
    # Send to the farthest child first, because it has the largest subtree.
    child_ranks = [
        (child + root) % world_size for child in reversed(children(tree_rank, world_size))
    ]
    CombinedWork([communicator.send(flat, child, kind) for child in child_ranks]).wait()


def parent(rank: int) -> int:
    """Return the parent of a rank other than 0."""
    return rank & (rank - 1)


def children(rank: int, world_size: int) -> list[int]:
    """Return the children of a rank, nearest first."""
    span = rank & -rank or world_size
    distances = (1 << bit for bit in range(world_size.bit_length()))
    return [rank + step for step in distances if step < span and rank + step < world_size]
