"""How collectives are counted that cannot be looked into, or that are to be counted alike.

all_reduce, reduce_scatter and all_gather count as a ring (algorithms/ring.py), broadcast as a
binomial tree (algorithms/tree.py), whatever carries them out. Each function gives the arguments of
`Traffic.begin`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.comm.algorithms import ring
from paceline.comm.algorithms.tree import children

Formula = Callable[[int, int, int, int], int]
"""Bytes sent, from rank, world size, elements and bytes of an element."""


def broadcast(tensor: Tensor, rank: int, world_size: int, root: int) -> dict[str, int]:
    place = (rank - root) % world_size
    copies = len(children(place, world_size))
    return {
        "bytes_sent": copies * tensor.nbytes,
        "bytes_received": tensor.nbytes if place else 0,
        "messages": copies,
    }


def reduce_scatter(tensor: Tensor, rank: int, world_size: int) -> dict[str, int]:
    return _laps(1, ring.reduce_scatter_bytes_sent, tensor, rank, world_size)


def all_gather(tensor: Tensor, rank: int, world_size: int) -> dict[str, int]:
    return _laps(1, ring.all_gather_bytes_sent, tensor, rank, world_size)


def all_reduce(tensor: Tensor, rank: int, world_size: int) -> dict[str, int]:
    return _laps(2, ring.Ring().bytes_sent, tensor, rank, world_size)


def _laps(
    laps: int, formula: Formula, tensor: Tensor, rank: int, world_size: int
) -> dict[str, int]:
    left = (rank - 1) % world_size
    size = (world_size, tensor.numel(), tensor.element_size())
    return {
        "bytes_sent": formula(rank, *size),
        "bytes_received": formula(left, *size),
        "messages": laps * (world_size - 1),
    }
