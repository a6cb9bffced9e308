"""Recursive halving and doubling: a reduce-scatter by halving, then an all-gather by doubling.

With eight ranks, the first partners are ranks 0 and 4, 1 and 5, and so on. Each rank keeps one half
of the tensor, sends the other half to its partner and adds what it receives. Partners at distance 2
then repeat this with the remaining half, and partners at distance 1 with the remaining quarter.
Each rank then holds the sum of one eighth. The all-gather runs the same steps in reverse, without
adding: each step doubles the data that a rank holds, until every rank has the complete sum. This
moves no more data than a ring, in 2 log2(P) instead of 2 (P - 1) steps.

The algorithm requires a power-of-two number of ranks. For other world sizes, the first ranks form
pairs: the odd rank of each pair sends its tensor to the even rank, stays idle, and receives the
result at the end.

Order of summation: paired ranks, then partners from the largest to the smallest distance. This is a
balanced binary tree over the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.comm.algorithms.base import Algorithm
from paceline.comm.buffers import chunk, chunk_begin, chunk_elements
from paceline.comm.cost import Cost, Network

if TYPE_CHECKING:
    from paceline.comm.communicator import Communicator


class HalvingDoubling(Algorithm):
    def all_reduce(self, communicator: Communicator, tensor: Tensor, kind: str) -> None:
        flat = tensor.view(-1)
        rank, extra = communicator.rank, _extra_ranks(communicator.world_size)
        if rank >= 2 * extra:
            _halve_and_double(communicator, flat, kind)
        elif rank % 2 == 1:
            communicator.send(flat, rank - 1, kind).wait()
            communicator.recv(flat, rank - 1, kind).wait()
        else:
            incoming = torch.empty_like(flat)
            communicator.recv(incoming, rank + 1, kind).wait()
            flat.add_(incoming)
            _halve_and_double(communicator, flat, kind)
            communicator.send(flat, rank + 1, kind).wait()

    def bytes_sent(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """Return the bytes that a rank sends in halving, doubling and pairing.

        Halving sends all chunks except the rank's own, and each doubling step sends all chunks
        completed so far.
        """
        extra = _extra_ranks(world_size)
        if rank < 2 * extra and rank % 2 == 1:
            return elements * element_bytes
        active, index = world_size - extra, _active_index(rank, extra)
        halving = elements - chunk_elements(elements, active, index)
        doubling = sum(
            chunk_begin(elements, active, first + width) - chunk_begin(elements, active, first)
            for width in _widths(active)
            for first in [index // width * width]
        )
        pairing = elements if rank < 2 * extra else 0
        return (halving + doubling + pairing) * element_bytes

    def bytes_received(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """Return the same number as `bytes_sent`.

        A rank receives as many bytes in halving as it sends in doubling, and vice versa.
        """
        return self.bytes_sent(rank, world_size, elements, element_bytes)

    def cost(self, world_size: int, size_bytes: float, network: Network) -> Cost:
        pairings = 1 if _extra_ranks(world_size) else 0
        active = world_size - _extra_ranks(world_size)
        rounds = len(_widths(active))
        scattered = size_bytes * (active - 1) / active
        seconds = network.seconds(
            messages=2 * rounds + 2 * pairings,
            moved_bytes=2 * scattered + 2 * pairings * size_bytes,
            reduced_bytes=scattered + pairings * size_bytes,
        )
        return Cost(seconds, 2 * scattered + pairings * size_bytes, messages=2 * rounds + pairings)


def _halve_and_double(communicator: Communicator, flat: Tensor, kind: str) -> None:
    """All-reduce among the active ranks, whose number is a power of two.

    The tensor is split into one chunk per active rank, and `width` is the number of chunks in a
    block.
    """
    extra = _extra_ranks(communicator.world_size)
    active, index = communicator.world_size - extra, _active_index(communicator.rank, extra)
    buffer = torch.empty_like(chunk(flat, active, 0, active // 2)) if active > 1 else flat
    for width in reversed(_widths(active)):
        partner = _active_rank(index ^ width, extra)
        mine = chunk(flat, active, index // width * width, width)
        other = chunk(flat, active, (index ^ width) // width * width, width)
        incoming = buffer[: mine.numel()]
        communicator.sendrecv(other, partner, incoming, partner, kind).wait()
        mine.add_(incoming)
    for width in _widths(active):
        partner = _active_rank(index ^ width, extra)
        mine = chunk(flat, active, index // width * width, width)
        other = chunk(flat, active, (index ^ width) // width * width, width)
        communicator.sendrecv(mine, partner, other, partner, kind).wait()


def _extra_ranks(world_size: int) -> int:
    """Return how many ranks exceed the largest power of two, which is also the number of pairs."""
    return world_size - (1 << world_size.bit_length() - 1)


def _active_index(rank: int, extra: int) -> int:
    """Return the index of an active rank among the active ranks."""
    return rank // 2 if rank < 2 * extra else rank - extra


def _active_rank(index: int, extra: int) -> int:
    return 2 * index if index < extra else index + extra


def _widths(active: int) -> list[int]:
    """Return 1, 2, 4, ... up to half of the active ranks."""
    return [1 << bit for bit in range(active.bit_length() - 1)]
