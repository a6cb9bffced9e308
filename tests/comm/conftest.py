"""Teams of workers of every kind, for tests that hold for any communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch

from paceline.comm import in_process
from worker_pool import WorkerPool

T = TypeVar("T")

TEAMS = [
    *(("in_process", world_size) for world_size in range(1, 9)),
    *(("torch_distributed", world_size) for world_size in range(1, 5)),
]


@dataclass(frozen=True)
class Team:
    """So many workers, connected by one kind of communicator."""

    world_size: int
    pool: WorkerPool | None

    def run(self, function: Callable[..., T], *arguments: object) -> list[T]:
        """Call `function(communicator, *arguments)` on every rank; the results, by rank."""
        if self.pool is not None:
            return self.pool.run(self.world_size, function, *arguments)
        return in_process.run(
            self.world_size, lambda communicator: function(communicator, *arguments)
        )

    def run_fresh(
        self, function: Callable[..., T], *arguments: object, timeout_seconds: float
    ) -> list[T]:
        """The same with a group of its own, which may break."""
        if self.pool is not None:
            return self.pool.run(
                self.world_size, function, *arguments, fresh=True, timeout_seconds=timeout_seconds
            )
        return in_process.run(
            self.world_size,
            lambda communicator: function(communicator, *arguments),
            timeout_seconds=timeout_seconds,
        )


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4) as workers:
        yield workers


def make_team(pool: WorkerPool, kind: str, world_size: int) -> Team:
    return Team(world_size, pool if kind == "torch_distributed" else None)


@pytest.fixture(params=TEAMS, ids=lambda team: f"{team[0]}-{team[1]}")
def team(request: pytest.FixtureRequest, pool: WorkerPool) -> Team:
    return make_team(pool, *request.param)


@pytest.fixture(params=["in_process", "torch_distributed"])
def team_of_three(request: pytest.FixtureRequest, pool: WorkerPool) -> Team:
    """Three: neither a pair nor a power of two."""
    return make_team(pool, request.param, 3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Workers that are threads already have no use for more of them inside an addition."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
