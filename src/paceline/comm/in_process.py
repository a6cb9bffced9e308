"""Workers that are threads of one process: for tests, for teaching, for trying an algorithm out.

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

Channel = tuple[int, ...]
"""Which fork of which fork: messages on one channel never meet those on another."""

Route = tuple[Channel, int, int]
"""Channel, sender, receiver."""


class InProcessGroup:
    """The post office of `world_size` workers, which makes their communicators."""

    def __init__(self, world_size: int, timeout_seconds: float = 30.0) -> None:
        self._changed = Condition()
        self._letters: dict[tuple[Route, int], Tensor] = {}
        self._closed: set[tuple[Channel, int]] = set()
        self.communicators = [
            InProcessCommunicator(self, rank, world_size, timeout_seconds, None, ())
            for rank in range(world_size)
        ]

    def put(self, route: Route, number: int, letter: Tensor) -> None:
        with self._changed:
            self._letters[route, number] = letter
            self._changed.notify_all()

    def has(self, route: Route, number: int) -> bool:
        """Whether `take` would come back at once."""
        with self._changed:
            return self._is_decided(route, number)

    def take(
        self, route: Route, number: int, seconds: float, operation: OperationContext
    ) -> Tensor:
        """The letter, once it is there; an error where its sender left or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_decided(route, number), timeout=seconds)
            if (route, number) in self._letters:
                return self._letters.pop((route, number))
            if self._is_cut(route):
                raise operation.failed("the connection was closed")
            raise operation.timed_out(seconds)

    def leave(self, channel: Channel, rank: int) -> None:
        """Nothing more comes from or goes to this rank, on this channel and on forks of it.

        What it has sent can still be received.
        """
        with self._changed:
            self._closed.add((channel, rank))
            self._changed.notify_all()

    def close(self) -> None:
        for communicator in self.communicators:
            communicator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_decided(self, route: Route, number: int) -> bool:
        return (route, number) in self._letters or self._is_cut(route)

    def _is_cut(self, route: Route) -> bool:
        channel, sender, receiver = route
        return any(
            (channel[:depth], rank) in self._closed
            for depth in range(len(channel) + 1)
            for rank in (sender, receiver)
        )


class InProcessCommunicator(Communicator):
    def __init__(
        self,
        hub: InProcessGroup,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        traffic: Traffic | None,
        channel: Channel,
    ) -> None:
        super().__init__(rank, world_size, timeout_seconds, traffic)
        self._hub = hub
        self._channel = channel
        self._forks = 0
        # Letters are numbered, so that receives may be waited for in any order.
        self._sent: Counter[int] = Counter()
        self._awaited: Counter[int] = Counter()

    def send(self, tensor: Tensor, to: int, kind: str) -> Work:
        self.check_peer(to)
        if tensor.numel() == 0:
            return CompletedWork()
        transfer = self.traffic.begin(kind, bytes_sent=tensor.nbytes, messages=1)
        letter = StagingBuffer.of(tensor).flat.clone()
        self._hub.put((self._channel, self.rank, to), self._sent[to], letter)
        self._sent[to] += 1
        return self.track_transfer(CompletedWork(), transfer)

    def recv(self, tensor: Tensor, source: int, kind: str) -> Work:
        self.check_peer(source)
        if tensor.numel() == 0:
            return CompletedWork()
        transfer = self.traffic.begin(kind, bytes_received=tensor.nbytes)
        work = _Receive(self, self._hub, self._channel, tensor, source, self._awaited[source])
        self._awaited[source] += 1
        return self.track_transfer(work, transfer)

    def dup(self, traffic: Traffic | None = None) -> Self:
        self._forks += 1
        return type(self)(
            self._hub,
            self.rank,
            self.world_size,
            self.timeout_seconds,
            traffic or self.traffic,
            (*self._channel, self._forks),
        )

    def _disconnect(self) -> None:
        self._hub.leave(self._channel, self.rank)


class _Receive(Work):
    def __init__(
        self,
        communicator: Communicator,
        hub: InProcessGroup,
        channel: Channel,
        tensor: Tensor,
        source: int,
        number: int,
    ) -> None:
        super().__init__()
        self._operation = communicator.context("recv from", (source,))
        self._seconds = communicator.timeout_seconds
        self._hub, self._tensor, self._number = hub, tensor.detach(), number
        self._route = (channel, source, communicator.rank)

    def _block(self) -> None:
        letter = self._hub.take(self._route, self._number, self._seconds, self._operation)
        if letter.dtype != self._tensor.dtype or letter.numel() != self._tensor.numel():
            raise ValueError(
                f"rank {self._route[1]} sent {letter.numel()} x {letter.dtype} where rank "
                f"{self._route[2]} receives {self._tensor.numel()} x {self._tensor.dtype}"
            )
        self._tensor.copy_(letter.view(self._tensor.shape))

    def _poll(self) -> bool:
        return self._hub.has(self._route, self._number)


def single() -> Communicator:
    """Create a communicator with one rank."""
    return InProcessGroup(1).communicators[0]


def run(
    world_size: int, work: Callable[[Communicator], T], timeout_seconds: float = 30.0
) -> list[T]:
    """Call `work` once a rank, each in a thread with its communicator; the results, by rank.

    When one fails, its communicator is closed, so that the others end too; the first failure in
    time is raised.
    """
    results: dict[int, T] = {}
    failures: list[Exception] = []

    def worker(communicator: Communicator) -> None:
        try:
            results[communicator.rank] = work(communicator)
        except Exception as error:  # noqa: BLE001 - raised again below
            failures.append(error)
            hub.leave((), communicator.rank)

    with InProcessGroup(world_size, timeout_seconds) as hub:
        threads = [Thread(target=worker, args=(each,)) for each in hub.communicators]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(world_size)]
