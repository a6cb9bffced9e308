"""Workers and parameter servers as threads of one process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import Thread
from typing import TypeVar

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.connection import Connection
from paceline.strategies.parameter_server.strategy import ParameterServer
from paceline.strategies.strategy import MakeOptimizer, ServerStrategy
from tests.support import toy_replicas as toy

T = TypeVar("T")


def is_even(rank: int) -> bool:
    return rank % 2 == 0


def connected(rank: int, server: int, is_same_node: bool = True) -> tuple[Connection, Connection]:
    """Return the worker's end and the server's end of a connection."""
    names = f"rank {rank}", f"server {server}"
    ends = socket.socketpair()
    return (
        Connection(ends[0], *names, is_same_node=is_same_node),
        Connection(ends[1], *reversed(names)),
    )


def run_with_servers(
    workers: int,
    make: Callable[[], ServerStrategy],
    make_optimizer: MakeOptimizer,
    work: Callable[[Communicator, Sequence[Connection]], T],
    shares_memory: Callable[[int], bool] = is_even,
) -> list[T]:
    """Call `work` on each worker with its connections, and return the results.

    By default, workers of even rank share memory with the servers, and the messages of the others
    carry the data.
    """
    with ExitStack() as stack:
        pairs = [
            [connected(rank, number, shares_memory(rank)) for rank in range(workers)]
            for number in range(len(make().server_nodes(1)))
        ]
        for end in (end for of_server in pairs for pair in of_server for end in pair):
            stack.enter_context(end)
        threads = [
            Thread(
                target=make().serve,
                args=(number, [end for _, end in of_server], make_optimizer),
            )
            for number, of_server in enumerate(pairs)
        ]
        for thread in threads:
            thread.start()

        def worker(communicator: Communicator) -> T:
            servers = [of_server[communicator.rank][0] for of_server in pairs]
            try:
                return work(communicator, servers)
            finally:
                for server in servers:
                    server.close()

        try:
            return in_process.run(workers, worker)
        finally:
            for thread in threads:
                thread.join(30.0)


def with_servers(
    workers: int,
    make: Callable[[], ParameterServer],
    optimizer: toy.MakeOptimizer,
    work: Callable[[ParameterServer], T],
    clip_norm: float | None = None,
    shares_memory: Callable[[int], bool] = is_even,
) -> list[T]:
    """Call `work` on each worker, with a strategy that is set up, and return the results."""

    def worker(communicator: Communicator, servers: Sequence[Connection]) -> T:
        strategy = make()
        strategy.setup(toy.replica(communicator, optimizer, servers=servers, clip_norm=clip_norm))
        result = work(strategy)
        # A worker that leaves early ends the others.
        communicator.barrier().wait()
        return result

    make_one = lambda weights: optimizer([weights])  # noqa: E731
    return run_with_servers(workers, make, make_one, worker, shares_memory)
