"""Halving and doubling: pairs exchange halves of the tensor, then quarters, and back.

With eight ranks, ranks 0 and 4 are partners, 1 and 5 are, and so on. Each rank keeps a half of the
tensor, sends the other half to its partner and adds what it receives. Then partners at distance 2
do the same with this half, and partners at distance 1 with the quarter. Each rank ends with the sum
of its own eighth, and the same steps in reverse, without adding, double the data of every rank
until it is complete. This moves no more data than a ring, in 2 log2(P) instead of 2 (P - 1) steps.

The algorithm requires a power of two. Otherwise, the first ranks form pairs beforehand: the odd
rank of a pair sends its whole tensor to the even rank, is idle, and receives the whole result at
the end.

Order of summation: the ranks of a pair first, then partners at the largest distance first: a
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
        rank, folded = communicator.rank, _folded_pairs(communicator.world_size)
        if rank >= 2 * folded:
            _halve_and_double(communicator, flat, kind)
        elif rank % 2 == 1:
            communicator.send(flat, rank - 1, kind).wait()
            communicator.recv(flat, rank - 1, kind).wait()
        else:
            arriving = torch.empty_like(flat)
            communicator.recv(arriving, rank + 1, kind).wait()
            flat.add_(arriving)
            _halve_and_double(communicator, flat, kind)
            communicator.send(flat, rank + 1, kind).wait()

    def bytes_sent(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """Halving sends all chunks but the own one; doubling sends all complete chunks."""
        folded = _folded_pairs(world_size)
        if rank < 2 * folded and rank % 2 == 1:
            return elements * element_bytes
        members, member = world_size - folded, _member(rank, folded)
        halving = elements - chunk_elements(elements, members, member)
        doubling = sum(
            chunk_begin(elements, members, first + width) - chunk_begin(elements, members, first)
            for width in _widths(members)
            for first in [member // width * width]
        )
        folding = elements if rank < 2 * folded else 0
        return (halving + doubling + folding) * element_bytes

    def bytes_received(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """Return as much as it sends: a rank receives in halving what it sends in doubling."""
        return self.bytes_sent(rank, world_size, elements, element_bytes)

    def cost(self, world_size: int, size_bytes: float, network: Network) -> Cost:
        folds = 1 if _folded_pairs(world_size) else 0
        members = world_size - _folded_pairs(world_size)
        rounds = len(_widths(members))
        scattered = size_bytes * (members - 1) / members
        seconds = network.seconds(
            messages=2 * rounds + 2 * folds,
            moved_bytes=2 * scattered + 2 * folds * size_bytes,
            reduced_bytes=scattered + folds * size_bytes,
        )
        return Cost(seconds, 2 * scattered + folds * size_bytes, messages=2 * rounds + folds)


def _halve_and_double(communicator: Communicator, flat: Tensor, kind: str) -> None:
    """All-reduce among the members, the ranks that are not idle: a power of two.

    The tensor is split into one chunk per member, and `width` is the number of chunks in a block.
    """
    folded = _folded_pairs(communicator.world_size)
    members, member = communicator.world_size - folded, _member(communicator.rank, folded)
    buffer = torch.empty_like(chunk(flat, members, 0, members // 2)) if members > 1 else flat
    for width in reversed(_widths(members)):
        partner = _rank(member ^ width, folded)
        mine = chunk(flat, members, member // width * width, width)
        other = chunk(flat, members, (member ^ width) // width * width, width)
        arriving = buffer[: mine.numel()]
        communicator.sendrecv(other, partner, arriving, partner, kind).wait()
        mine.add_(arriving)
    for width in _widths(members):
        partner = _rank(member ^ width, folded)
        mine = chunk(flat, members, member // width * width, width)
        other = chunk(flat, members, (member ^ width) // width * width, width)
        communicator.sendrecv(mine, partner, other, partner, kind).wait()


def _folded_pairs(world_size: int) -> int:
    """Return the number of ranks beyond the largest power of two, and so of pairs."""
    return world_size - (1 << world_size.bit_length() - 1)


def _member(rank: int, folded: int) -> int:
    """Return the index of a rank that is not idle among the members."""
    return rank // 2 if rank < 2 * folded else rank - folded


def _rank(member: int, folded: int) -> int:
    return 2 * member if member < folded else member + folded


def _widths(members: int) -> list[int]:
    """Return 1, 2, 4, ... up to half of the members."""
    return [1 << bit for bit in range(members.bit_length() - 1)]
