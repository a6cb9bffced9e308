"""Collectives through outboxes, whatever the order in which the workers get on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from paceline.comm import in_process
from paceline.comm.algorithms.chunks import chunk
from paceline.comm.arena import Arena
from paceline.comm.outbox import (
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    DirectAllReduce,
    Outboxes,
    ReduceScatter,
)

WORKERS = 3
PIECE_BYTES = 4096

Begin = Callable[[Outboxes, torch.Tensor], Collective]

KINDS: tuple[Begin, ...] = (
    AllReduce,
    DirectAllReduce,
    ReduceScatter,
    AllGather,
    lambda boxes, flat: Broadcast(boxes, flat, 0),
)


def outboxes_of_all() -> list[Outboxes]:
    size_bytes = Outboxes.size_bytes(WORKERS, PIECE_BYTES)
    arena = Arena(in_process.Hub(1).communicators[0], size_bytes)
    return [Outboxes(arena, 0, rank, WORKERS, PIECE_BYTES) for rank in range(WORKERS)]


def work_through(works: list[Collective]) -> Iterator[None]:
    """As a communicator does, with a moment for the others after every step."""
    while not all(work.is_over for work in works):
        for work in works:
            work.advance()
            yield


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
    running = [
        work_through([kind(boxes, flat) for (kind, _), flat in zip(steps, own, strict=True)])
        for boxes, own in zip(outboxes_of_all(), tensors, strict=True)
    ]
    for _ in range(100_000):
        if not running:
            break
        worker = chance.choice(running)
        for _ in range(chance.choice([1, 1, 30])):
            if next(worker, running) is running:
                running.remove(worker)
                break
    assert not running
    for rank, own in enumerate(tensors):
        for step, ((kind, elements), flat) in enumerate(zip(steps, own, strict=True)):
            right = expected(kind, step, elements)
            if kind is ReduceScatter:
                flat, right = chunk(flat, WORKERS, rank), chunk(right, WORKERS, rank)
            torch.testing.assert_close(flat, right, rtol=0, atol=0)
