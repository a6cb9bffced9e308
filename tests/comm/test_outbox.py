"""Collectives through outboxes, whatever the order in which the workers get on."""

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

WORKERS = 3
PIECE_BYTES = 4096

Begin = Callable[[CollectiveBuffers, torch.Tensor], Collective | Barrier]


def meet(boxes: CollectiveBuffers, _: torch.Tensor) -> Barrier:
    return Barrier(boxes)


KINDS: tuple[Begin, ...] = (
    TwoShotAllReduce,
    OneShotAllReduce,
    ReduceScatter,
    AllGather,
    lambda boxes, flat: Broadcast(boxes, flat, 0),
    meet,
)


class Worker:
    """One that sleeps once nothing moves, as a communicator does, until another calls it."""

    def __init__(self, workers: list[Worker], arena: SharedSegment) -> None:
        self.is_awake = True
        self.works: list[Collective | Barrier] = []
        self._workers = workers
        self.boxes = CollectiveBuffers(
            arena, 0, len(workers), WORKERS, PIECE_BYTES, self._call_peers
        )
        workers.append(self)

    def _call_peers(self) -> None:
        for worker in self._workers:
            if worker is not self:
                worker.is_awake = True

    @property
    def is_over(self) -> bool:
        return all(work.is_complete for work in self.works)

    def go_on(self) -> None:
        moved = False
        for work in self.works:
            moved |= work.progress()
        self.is_awake = moved


def team() -> list[Worker]:
    size_bytes = CollectiveBuffers.size_bytes(WORKERS, PIECE_BYTES)
    arena = SharedSegment(in_process.single(), size_bytes)
    workers: list[Worker] = []
    for _ in range(WORKERS):
        Worker(workers, arena)
    return workers


def expected(kind: Begin, step: int, elements: int) -> torch.Tensor:
    """With `step + 10 ** worker` everywhere in the beginning."""
    values = [float(step + 10**worker) for worker in range(WORKERS)]
    if kind is AllGather:
        flat = torch.empty(elements)
        for worker, value in enumerate(values):
            chunk(flat, WORKERS, worker).fill_(value)
        return flat
    return torch.full((elements,), sum(values) if isinstance(kind, type) else values[0])


@pytest.mark.parametrize("seed", range(20))
def test_collectives_under_way_together_do_not_disturb_one_another(seed: int) -> None:
    chance = random.Random(seed)
    steps = [(chance.choice(KINDS), chance.choice([10, 300, 5000])) for _ in range(12)]
    tensors = [
        [
            torch.full((elements,), float(step + 10**rank))
            for step, (_, elements) in enumerate(steps)
        ]
        for rank in range(WORKERS)
    ]
    workers = team()
    for worker, own in zip(workers, tensors, strict=True):
        worker.works = [
            kind(worker.boxes, flat) for (kind, _), flat in zip(steps, own, strict=True)
        ]
    for _ in range(100_000):
        ready = [worker for worker in workers if worker.is_awake and not worker.is_over]
        if not ready:
            break
        worker = chance.choice(ready)
        for _ in range(chance.choice([1, 1, 30])):
            worker.go_on()
    assert all(worker.is_over for worker in workers), "some sleep and nobody calls them"
    for rank, own in enumerate(tensors):
        for step, ((kind, elements), flat) in enumerate(zip(steps, own, strict=True)):
            if kind is meet:
                continue
            right = expected(kind, step, elements)
            if kind is ReduceScatter:
                flat, right = chunk(flat, WORKERS, rank), chunk(right, WORKERS, rank)
            torch.testing.assert_close(flat, right, rtol=0, atol=0)
