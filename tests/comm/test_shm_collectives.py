"""Collectives in shared memory, for any order in which ranks progress."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from paceline.comm import in_process
from paceline.comm.buffers import chunk
from paceline.comm.shm.collectives import (
    AllGather,
    Barrier,
    Broadcast,
    Collective,
    CollectiveBuffers,
    OneShotAllReduce,
    ReduceScatter,
    TwoShotAllReduce,
)
from paceline.comm.shm.segment import SharedSegment

WORLD_SIZE = 3
SLOT_BYTES = 4096

Create = Callable[[CollectiveBuffers, torch.Tensor], Collective | Barrier]


def barrier(buffers: CollectiveBuffers, _: torch.Tensor) -> Barrier:
    return Barrier(buffers)


OPERATIONS: tuple[Create, ...] = (
    TwoShotAllReduce,
    OneShotAllReduce,
    ReduceScatter,
    AllGather,
    lambda buffers, flat: Broadcast(buffers, flat, 0),
    barrier,
)


class Rank:
    """Sleeps when nothing progresses, as a communicator does, until another rank notifies it."""

    def __init__(self, ranks: list[Rank], segment: SharedSegment) -> None:
        self.is_awake = True
        self.operations: list[Collective | Barrier] = []
        self._ranks = ranks
        self.buffers = CollectiveBuffers(
            segment, 0, len(ranks), WORLD_SIZE, SLOT_BYTES, self._notify_all
        )
        ranks.append(self)

    def _notify_all(self) -> None:
        for rank in self._ranks:
            if rank is not self:
                rank.is_awake = True

    @property
    def is_complete(self) -> bool:
        return all(operation.is_complete for operation in self.operations)

    def progress(self) -> None:
        has_progressed = False
        for operation in self.operations:
            has_progressed |= operation.progress()
        self.is_awake = has_progressed


def create_ranks() -> list[Rank]:
    size_bytes = CollectiveBuffers.size_bytes(WORLD_SIZE, SLOT_BYTES)
    segment = SharedSegment(in_process.single(), size_bytes)
    ranks: list[Rank] = []
    for _ in range(WORLD_SIZE):
        Rank(ranks, segment)
    return ranks


def expected(create: Create, step: int, elements: int) -> torch.Tensor:
    """Return the result if every rank starts with `step + 10 ** rank` everywhere."""
    values = [float(step + 10**rank) for rank in range(WORLD_SIZE)]
    if create is AllGather:
        flat = torch.empty(elements)
        for rank, value in enumerate(values):
            chunk(flat, WORLD_SIZE, rank).fill_(value)
        return flat
    return torch.full((elements,), sum(values) if isinstance(create, type) else values[0])


@pytest.mark.parametrize("seed", range(20))
def test_collectives_in_progress_together_do_not_interfere(seed: int) -> None:
    rng = random.Random(seed)
    steps = [(rng.choice(OPERATIONS), rng.choice([10, 300, 5000])) for _ in range(12)]
    tensors = [
        [
            torch.full((elements,), float(step + 10**rank))
            for step, (_, elements) in enumerate(steps)
        ]
        for rank in range(WORLD_SIZE)
    ]
    ranks = create_ranks()
    for rank, own in zip(ranks, tensors, strict=True):
        rank.operations = [
            create(rank.buffers, flat) for (create, _), flat in zip(steps, own, strict=True)
        ]
    for _ in range(100_000):
        ready = [rank for rank in ranks if rank.is_awake and not rank.is_complete]
        if not ready:
            break
        rank = rng.choice(ready)
        for _ in range(rng.choice([1, 1, 30])):
            rank.progress()
    assert all(rank.is_complete for rank in ranks), "a rank sleeps and is never notified"
    for index, own in enumerate(tensors):
        for step, ((create, elements), flat) in enumerate(zip(steps, own, strict=True)):
            if create is barrier:
                continue
            result = expected(create, step, elements)
            if create is ReduceScatter:
                flat, result = chunk(flat, WORLD_SIZE, index), chunk(result, WORLD_SIZE, index)
            torch.testing.assert_close(flat, result, rtol=0, atol=0)
