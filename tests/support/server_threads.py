"""Workers and parameter servers as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from threading import Thread
from typing import TypeVar

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.in_process import InProcessGroup
from paceline.strategies.parameter_server.protocol import SERVER, WORKER
from paceline.strategies.parameter_server.strategy import ParameterServer
from tests.support.toy_replicas import MakeOptimizer, replica

T = TypeVar("T")


def with_servers(
    workers: int,
    make: Callable[[], ParameterServer],
    optimizer: MakeOptimizer,
    work: Callable[[ParameterServer], T],
    clip_norm: float | None = None,
) -> list[T]:
    """Call `work` on each worker, with a strategy that is set up, and return the results."""
    count = len(make().server_nodes(1))
    with ExitStack() as stack:
        pairs = [
            [stack.enter_context(InProcessGroup(2)).communicators for _ in range(workers)]
            for _ in range(count)
        ]
        threads = [
            Thread(
                target=make().serve,
                args=(number, [pair[SERVER] for pair in of_server]),
                kwargs={"make_optimizer": lambda weights: optimizer([weights])},
            )
            for number, of_server in enumerate(pairs)
        ]
        for thread in threads:
            thread.start()

        def worker(communicator: Communicator) -> T:
            links = [of_server[communicator.rank][WORKER] for of_server in pairs]
            try:
                strategy = make()
                strategy.setup(replica(communicator, optimizer, servers=links, clip_norm=clip_norm))
                result = work(strategy)
                # A worker that leaves early ends the others.
                communicator.barrier().wait()
                return result
            finally:
                for link in links:
                    link.close()

        try:
            return in_process.run(workers, worker)
        finally:
            for thread in threads:
                thread.join(30.0)
