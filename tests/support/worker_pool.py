"""Long-lived worker processes for tests, since importing torch takes seconds.

A process that has imported everything and computed nothing is forked for each worker, so all pools
of a test session together pay for the imports once.

    def work(communicator: Communicator, size: int) -> float: ...   # at a module's top level

    results = pool.run(3, work, 1009)      # one result a rank

Functions and results travel by pickle through pipes. The workers keep one group of gloo for each
world size; `fresh=True` makes one for a single call, for tests that break it.
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
    meeting: Rendezvous
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
"""What workers need sooner or later, and importing which starts no thread."""


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
        """A worker ends when its pipe does."""
        self.pipe.close()
        self.process.join(CLOSING_SECONDS)
        self.process.kill()
        self.process.join()
        self.process.close()


class WorkerPool:
    def __init__(self, size: int = 4) -> None:
        self._workers = [_Worker() for _ in range(size)]
        self._meetings: dict[int, int] = {}
        """By world size, the port at which the long-lived group met."""

    def run(
        self,
        world_size: int,
        function: Callable[..., T],
        *arguments: object,
        fresh: bool = False,
        timeout_seconds: float = GROUP_TIMEOUT_SECONDS,
    ) -> list[T]:
        """Call `function(communicator, *arguments)` on every rank; the results, by rank."""
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
        """The same, for calls that are meant to fail. Without one of its workers, a pool is of no
        more use: a test that kills one has a pool of its own."""
        port = free_port() if fresh else self._meetings.setdefault(world_size, free_port())
        workers = self._workers[:world_size]
        for rank, worker in enumerate(workers):
            meeting = Rendezvous(rank, world_size, "127.0.0.1", port, timeout_seconds=30.0)
            worker.pipe.send(_Call(meeting, timeout_seconds, fresh, function, arguments))
        outcomes = [worker.outcome() for worker in workers]
        if not fresh and any(outcome.error is not None for outcome in outcomes):
            del self._meetings[world_size]  # the ranks may be out of step
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
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(pipe: Connection) -> None:
    """What a worker does until its pipe ends."""
    import torch

    torch.set_num_threads(1)
    groups: dict[Rendezvous, Communicator] = {}
    while True:
        try:
            call: _Call = pipe.recv()
        except EOFError:
            break
        pipe.send(_answer(call, groups))
    # Without the interpreter's slow farewell; there is nothing left to be written.
    os._exit(0)


def _answer(call: _Call, groups: dict[Rendezvous, Communicator]) -> Outcome[Any]:
    try:
        if call.fresh:
            with _connect(call) as communicator:
                return Outcome(value=call.function(communicator, *call.arguments))
        if call.meeting not in groups:
            groups[call.meeting] = _connect(call)
        return Outcome(value=call.function(groups[call.meeting], *call.arguments))
    except Exception as error:  # noqa: BLE001 - it is the answer
        if call.meeting in groups:
            groups.pop(call.meeting).close()  # so that peers who wait for this rank fail too
        return Outcome(error=error)


def _connect(call: _Call) -> Communicator:
    from paceline.comm.torch_distributed import connect

    return connect(call.meeting, timeout_seconds=call.timeout_seconds)
