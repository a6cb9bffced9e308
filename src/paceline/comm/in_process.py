"""Communicator for ranks that are threads of one process, for tests and experiments.

For example, to run an algorithm on three ranks:

    def work(communicator):
        tensor = torch.full((4,), float(communicator.rank))
        Ring().all_reduce(communicator, tensor, "gradients")
        return tensor

    print(run(3, work))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Condition, Thread
from typing import Self, TypeVar

from torch import Tensor

from paceline.comm.buffers import StagingBuffer
from paceline.comm.communicator import Communicator, OperationContext
from paceline.comm.work import CompletedWork, Work
from paceline.measure.traffic import Traffic

T = TypeVar("T")

ContextId = tuple[int, ...]
"""The index of each `dup` call that led to a communicator. Messages never cross contexts."""

Route = tuple[ContextId, int, int]
"""Context ID, sender, receiver."""


class InProcessGroup:
    """Creates the communicators of `world_size` ranks and delivers their messages."""

    def __init__(self, world_size: int, timeout_seconds: float = 30.0) -> None:
        self._changed = Condition()
        self._messages: dict[tuple[Route, int], Tensor] = {}
        self._closed: set[tuple[ContextId, int]] = set()
        self.communicators = [
            InProcessCommunicator(self, rank, world_size, timeout_seconds, None, ())
            for rank in range(world_size)
        ]

    def put(self, route: Route, number: int, message: Tensor) -> None:
        with self._changed:
            self._messages[route, number] = message
            self._changed.notify_all()

    def is_ready(self, route: Route, number: int) -> bool:
        """Return whether `take` would return, or raise, without blocking."""
        with self._changed:
            return self._is_ready(route, number)

    def take(self, route: Route, number: int, seconds: float, context: OperationContext) -> Tensor:
        """Wait for a message. Raises PeerError if the sender or receiver closes, or on timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready(route, number), timeout=seconds)
            if (route, number) in self._messages:
                return self._messages.pop((route, number))
            if self._is_closed(route):
                raise context.failed("the connection was closed")
            raise context.timed_out(seconds)

    def disconnect(self, context_id: ContextId, rank: int) -> None:
        """Disconnect a rank from a communicator and its duplicates.

        Messages that were already sent can still be received.
        """
        with self._changed:
            self._closed.add((context_id, rank))
            self._changed.notify_all()

    def close(self) -> None:
        for communicator in self.communicators:
            communicator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_ready(self, route: Route, number: int) -> bool:
        return (route, number) in self._messages or self._is_closed(route)

    def _is_closed(self, route: Route) -> bool:
        context_id, sender, receiver = route
        return any(
            (context_id[:depth], rank) in self._closed
            for depth in range(len(context_id) + 1)
            for rank in (sender, receiver)
        )


class InProcessCommunicator(Communicator):
    """Created by `InProcessGroup`."""

    def __init__(
        self,
        group: InProcessGroup,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        traffic: Traffic | None,
        context_id: ContextId,
    ) -> None:
        super().__init__(rank, world_size, timeout_seconds, traffic)
        self._group = group
        self._context_id = context_id
        self._duplicates = 0
        # Messages are numbered, so that receives can complete in any order.
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def send(self, tensor: Tensor, to: int, kind: str) -> Work:
        self.check_peer(to)
        if tensor.numel() == 0:
            return CompletedWork()
        transfer = self.traffic.begin(kind, bytes_sent=tensor.nbytes, messages=1)
        message = StagingBuffer.from_tensor(tensor).flat.clone()
        self._group.put((self._context_id, self.rank, to), self._sent[to], message)
        self._sent[to] += 1
        return self.track_transfer(CompletedWork(), transfer)

    def recv(self, tensor: Tensor, source: int, kind: str) -> Work:
        self.check_peer(source)
        if tensor.numel() == 0:
            return CompletedWork()
        transfer = self.traffic.begin(kind, bytes_received=tensor.nbytes)
        work = _Receive(self, self._group, self._context_id, tensor, source, self._received[source])
        self._received[source] += 1
        return self.track_transfer(work, transfer)

    def dup(self, traffic: Traffic | None = None) -> Self:
        self._duplicates += 1
        return type(self)(
            self._group,
            self.rank,
            self.world_size,
            self.timeout_seconds,
            traffic or self.traffic,
            (*self._context_id, self._duplicates),
        )

    def _disconnect(self) -> None:
        self._group.disconnect(self._context_id, self.rank)


class _Receive(Work):
    def __init__(
        self,
        communicator: Communicator,
        group: InProcessGroup,
        context_id: ContextId,
        tensor: Tensor,
        source: int,
        number: int,
    ) -> None:
        super().__init__()
        self._context = communicator.context("recv from", (source,))
        self._timeout_seconds = communicator.timeout_seconds
        self._group, self._tensor, self._number = group, tensor.detach(), number
        self._route = (context_id, source, communicator.rank)

    def _block(self) -> None:
        message = self._group.take(self._route, self._number, self._timeout_seconds, self._context)
        if message.dtype != self._tensor.dtype or message.numel() != self._tensor.numel():
            raise ValueError(
                f"rank {self._route[1]} sent {message.numel()} x {message.dtype} but rank "
                f"{self._route[2]} expects {self._tensor.numel()} x {self._tensor.dtype}"
            )
        self._tensor.copy_(message.view(self._tensor.shape))

    def _poll(self) -> bool:
        return self._group.is_ready(self._route, self._number)


def single() -> Communicator:
    """Create a communicator with one rank."""
    return InProcessGroup(1).communicators[0]


def run(
    world_size: int, work: Callable[[Communicator], T], timeout_seconds: float = 30.0
) -> list[T]:
    """Call `work` for every rank, each in its own thread; return the results by rank.

    If a call fails, its communicator is closed, so that the other ranks fail too, and the first
    error is raised.
    """
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def worker(communicator: Communicator) -> None:
        try:
            results[communicator.rank] = work(communicator)
        except Exception as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            group.disconnect((), communicator.rank)

    with InProcessGroup(world_size, timeout_seconds) as group:
        threads = [Thread(target=worker, args=(each,)) for each in group.communicators]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]
