"""Long-lived worker processes, since importing torch takes seconds.

Workers are forked from a server process that has imported everything and computed nothing, so that
all pools of a test session import torch once.

    def work(communicator: Communicator, size: int) -> float: ...   # at a module's top level

    results = pool.run(3, work, 1009)      # one result per rank

Functions and results are pickled. The workers keep one gloo group per world size; `fresh=True`
creates a group for a single call, for tests that break it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from paceline.comm.communicator import Communicator
from paceline.comm.rendezvous import Rendezvous

T = TypeVar("T")

REPLY_SECONDS = 60.0
CLOSING_SECONDS = 5.0
GROUP_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """How a call ended on one rank."""

    value: T | None = None
    error: Exception | None = None
    died: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    rendezvous: Rendezvous
    timeout_seconds: float
    fresh: bool
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


PRELOADED = [
    "torch",
    "torch._dynamo",
    "paceline.launch.launcher",
    "paceline.strategies.fsdp",
    "paceline.strategies.ddp",
]
"""Modules that workers import, and whose import starts no thread."""


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def outcome(self) -> Outcome[Any]:
        try:
            if not self.pipe.poll(REPLY_SECONDS):
                self.process.kill()
                return Outcome(error=TimeoutError(f"no reply within {REPLY_SECONDS} s"), died=True)
            reply: Outcome[Any] = self.pipe.recv()
            return reply
        except (EOFError, ConnectionResetError):
            return Outcome(died=True)

    def close(self) -> None:
        """Close the pipe, upon which the worker exits."""
        self.pipe.close()
        self.process.join(CLOSING_SECONDS)
        self.process.kill()
        self.process.join()
        self.process.close()


class WorkerPool:
    def __init__(self, size: int = 4) -> None:
        self._workers = [_Worker() for _ in range(size)]
        self._ports: dict[int, int] = {}
        """Rendezvous port of the long-lived group, by world size."""

    def run(
        self,
        world_size: int,
        function: Callable[..., T],
        *arguments: object,
        fresh: bool = False,
        timeout_seconds: float = GROUP_TIMEOUT_SECONDS,
    ) -> list[T]:
        """Call `function(communicator, *arguments)` on every rank; return the results by rank."""
        outcomes = self.outcomes(
            world_size, function, *arguments, fresh=fresh, timeout_seconds=timeout_seconds
        )
        results = []
        for rank, outcome in enumerate(outcomes):
            if outcome.died or outcome.error is not None:
                raise outcome.error or RuntimeError(f"the worker of rank {rank} died")
            results.append(outcome.value)
        return results  # type: ignore[return-value]  # without an error, there is a value

    def outcomes(
        self,
        world_size: int,
        function: Callable[..., T],
        *arguments: object,
        fresh: bool = False,
        timeout_seconds: float = GROUP_TIMEOUT_SECONDS,
    ) -> list[Outcome[T]]:
        """Like `run`, for calls that may fail. A pool that has lost a worker is unusable, so a test
        that kills a worker creates its own pool."""
        port = free_port() if fresh else self._ports.setdefault(world_size, free_port())
        workers = self._workers[:world_size]
        for rank, worker in enumerate(workers):
            rendezvous = Rendezvous(rank, world_size, "127.0.0.1", port, timeout_seconds=30.0)
            worker.pipe.send(_Call(rendezvous, timeout_seconds, fresh, function, arguments))
        outcomes = [worker.outcome() for worker in workers]
        if not fresh and any(outcome.error is not None for outcome in outcomes):
            del self._ports[world_size]  # the ranks may be at different operations
        return outcomes

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def free_port() -> int:
    """Return an unused port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(pipe: Connection) -> None:
    """Answer calls until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    groups: dict[Rendezvous, Communicator] = {}
    while True:
        try:
            call: _Call = pipe.recv()
        except EOFError:
            break
        pipe.send(_answer(call, groups))
    # Skips the slow shutdown of the interpreter; nothing is left to flush.
    os._exit(0)


def _answer(call: _Call, groups: dict[Rendezvous, Communicator]) -> Outcome[Any]:
    try:
        if call.fresh:
            with _connect(call) as communicator:
                return Outcome(value=call.function(communicator, *call.arguments))
        if call.rendezvous not in groups:
            groups[call.rendezvous] = _connect(call)
        return Outcome(value=call.function(groups[call.rendezvous], *call.arguments))
    except Exception as error:  # noqa: BLE001 - returned to the caller
        if call.rendezvous in groups:
            groups.pop(call.rendezvous).close()  # so that peers that wait for this rank fail too
        return Outcome(error=error)


def _connect(call: _Call) -> Communicator:
    from paceline.comm.torch_distributed import connect

    return connect(call.rendezvous, timeout_seconds=call.timeout_seconds)
