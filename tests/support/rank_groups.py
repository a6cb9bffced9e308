"""Groups of ranks for tests that apply to every communicator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from paceline.comm import hierarchical, in_process
from paceline.comm.communicator import Communicator
from paceline.comm.shm import communicator as shared_memory
from tests.support import fake_device_memory
from tests.support.worker_pool import WorkerPool

T = TypeVar("T")
Connect = Callable[[Communicator], Communicator]

RANK_GROUPS = [
    *(("in_process", world_size) for world_size in range(1, 9)),
    *(("torch_distributed", world_size) for world_size in range(1, 5)),
    *(("shared_memory", world_size) for world_size in range(1, 5)),
    *(("hierarchical", world_size) for world_size in range(1, 5)),
    ("uneven_hosts", 4),
]


@dataclass(frozen=True)
class RankGroup:
    """`world_size` ranks, connected by one kind of communicator."""

    world_size: int
    pool: WorkerPool | None
    connect: Connect | None = None
    """Creates the communicator under test from a gloo communicator, in worker processes."""

    def run(self, function: Callable[..., T], *arguments: object) -> list[T]:
        """Call `function(communicator, *arguments)` on every rank; return the results by rank."""
        if self.pool is not None and self.connect is not None:
            return self.pool.run(self.world_size, _over, self.connect, function, *arguments)
        if self.pool is not None:
            return self.pool.run(self.world_size, function, *arguments)
        return in_process.run(
            self.world_size, lambda communicator: function(communicator, *arguments)
        )

    def run_fresh(
        self, function: Callable[..., T], *arguments: object, timeout_seconds: float
    ) -> list[T]:
        """Like `run`, with a new group, which may break."""
        if self.pool is not None:
            if self.connect is not None:
                function, arguments = _over, (self.connect, function, *arguments)
            return self.pool.run(
                self.world_size, function, *arguments, fresh=True, timeout_seconds=timeout_seconds
            )
        return in_process.run(
            self.world_size,
            lambda communicator: function(communicator, *arguments),
            timeout_seconds=timeout_seconds,
        )


def _over(
    communicator: Communicator, connect: Connect, function: Callable[..., T], *arguments: object
) -> T:
    with connect(communicator) as other:
        return function(other, *arguments)


def over_pairs(communicator: Communicator) -> Communicator:
    """Two workers per host; one on the last host if their number is odd."""
    return hierarchical.connect(communicator, communicator.rank // 2)


def over_three_and_one(communicator: Communicator) -> Communicator:
    return hierarchical.connect(communicator, communicator.rank // 3)


CONNECT: dict[str, Connect | None] = {
    "torch_distributed": None,
    "shared_memory": shared_memory.connect,
    "hierarchical": over_pairs,
    "uneven_hosts": over_three_and_one,
    "shared_gpu": fake_device_memory.connect,
}
"""For ranks that are processes."""


def make_rank_group(pool: WorkerPool, kind: str, world_size: int) -> RankGroup:
    if kind == "in_process":
        return RankGroup(world_size, None)
    return RankGroup(world_size, pool, CONNECT[kind])
