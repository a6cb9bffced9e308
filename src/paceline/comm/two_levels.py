"""Collectives on two levels, for hosts of equally many workers; each blocks until it is complete.

Every byte that must leave a host leaves it once, and all workers of a host carry equal parts.
"""

from __future__ import annotations

from torch import Tensor

from paceline.comm.algorithms import ring
from paceline.comm.algorithms.chunks import chunk, chunk_elements
from paceline.comm.levels import Hosts, Levels


class TwoLevels:
    """Over the connections of one worker."""

    def __init__(self, levels: Levels, hosts: Hosts) -> None:
        self._host, self._across = levels.host, levels.across
        self._hosts = hosts
        self._rank = hosts[levels.across.rank][levels.host.rank]

    def all_reduce(self, flat: Tensor, kind: str) -> None:
        """In each host; worker i sums chunk i with the workers i of the others; back again."""
        self._host.reduce_scatter(flat, kind).wait()
        self._across.all_reduce(self._own_chunk(flat), kind).wait()
        self._host.all_gather(flat, kind).wait()

    def broadcast(self, flat: Tensor, root: int, kind: str) -> None:
        """Through the root's host; worker i hands chunk i to the others'; there to everybody."""
        first = next(number for number, ranks in enumerate(self._hosts) if root in ranks)
        if self._across.rank == first:
            self._host.broadcast(flat, self._hosts[first].index(root), kind).wait()
        self._across.broadcast(self._own_chunk(flat), first, kind).wait()
        if self._across.rank != first:
            self._host.all_gather(flat, kind).wait()

    def reduce_scatter(self, flat: Tensor, kind: str) -> None:
        """As all_reduce, without the way back."""
        dealt = self._dealt(flat)
        for part, place in self._parts(flat, dealt):
            place.copy_(part)
        self._host.reduce_scatter(dealt, kind).wait()
        ring.reduce_scatter(self._across, self._own_chunk(dealt), kind)
        own, place = self._parts(flat, dealt)[self._rank]
        own.copy_(place)

    def all_gather(self, flat: Tensor, kind: str) -> None:
        """The way back alone."""
        dealt = self._dealt(flat)
        own, place = self._parts(flat, dealt)[self._rank]
        place.copy_(own)
        self._across.all_gather(self._own_chunk(dealt), kind).wait()
        self._host.all_gather(dealt, kind).wait()
        for part, place in self._parts(flat, dealt):
            part.copy_(place)

    def _own_chunk(self, flat: Tensor) -> Tensor:
        return chunk(flat, self._host.world_size, self._host.rank)

    def _dealt(self, flat: Tensor) -> Tensor:
        """Room for the chunks of all ranks, every one as large as the first."""
        ranks = self._host.world_size * self._across.world_size
        return flat.new_zeros(ranks * chunk_elements(flat.numel(), ranks, 0))

    def _parts(self, flat: Tensor, dealt: Tensor) -> list[tuple[Tensor, Tensor]]:
        """By rank, its chunk and the place of that in `dealt`, where the chunks of those who have
        the same place on their hosts follow one another."""
        ranks = self._host.world_size * self._across.world_size
        parts = []
        for rank in range(ranks):
            number, place = next(
                (number, ranks_there.index(rank))
                for number, ranks_there in enumerate(self._hosts)
                if rank in ranks_there
            )
            part = chunk(flat, ranks, rank)
            slot = chunk(dealt, ranks, place * self._across.world_size + number)
            parts.append((part, slot[: part.numel()]))
        return parts
