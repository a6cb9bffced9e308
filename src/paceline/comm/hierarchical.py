"""Workers on several hosts: shared memory inside each host, torch.distributed across hosts.

Messages go by shared memory where both workers are on one host, else over the network. Collectives
go on both levels (two_levels.py), in several steps; so they run on a background thread, with
connections of its own. Where hosts have unequal numbers of workers, collectives go over the network
between all of them, as torch.distributed carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from time import sleep
from typing import Self

from torch import Tensor

from paceline.comm import formulas, shared_memory
from paceline.comm.communicator import Communicator
from paceline.comm.composed import ComposedCommunicator
from paceline.comm.levels import (
    Hosts,
    Levels,
    are_even,
    connect_across,
    connect_host,
    divisible,
    find_hosts,
)
from paceline.comm.shared_memory import SharedMemoryCommunicator
from paceline.comm.two_levels import TwoLevels
from paceline.comm.work import Done, Work
from paceline.measure.traffic import Traffic

POLL_SECONDS = 0.0002


def over(communicator: Communicator, node: int) -> Communicator:
    """The quickest connection between workers; those who give the same node share memory.

    Collective. It counts into the same traffic, and needs the communicator given no more once it is
    made. On one host it is shared memory itself, and for hosts of one worker each the network.
    """
    hosts = find_hosts(communicator, node)
    if len(hosts) == 1:
        return shared_memory.over(communicator)
    network = communicator.fork()
    if all(len(ranks) == 1 for ranks in hosts):
        return network
    network.traffic = Traffic()
    host = connect_host(divisible(network), hosts, network.rank)
    if host is not None:
        host.traffic = Traffic()
    return HierarchicalCommunicator(network, host, hosts, communicator.traffic)


class HierarchicalCommunicator(ComposedCommunicator):
    """Made by `over`.

    `traffic` counts collectives as the contract has them counted, whoever carries them out.
    `network.traffic` is what went across hosts, and `host.traffic` what stayed inside.
    """

    def __init__(
        self,
        network: Communicator,
        host: SharedMemoryCommunicator | None,
        hosts: Hosts,
        traffic: Traffic,
    ) -> None:
        rank = network.rank
        super().__init__(
            rank, network.world_size, network.timeout_seconds, traffic, network.known_as
        )
        self.network, self.host, self._hosts = network, host, hosts
        self._neighbours = next(ranks for ranks in hosts if rank in ranks)
        """Those on the same host, in the order of their places."""
        self._is_even = are_even(hosts)
        self._across: Communicator | None = None

    @cached_property
    def two_levels(self) -> TwoLevels:
        """Of hosts with equally many workers, more than one each. Collective at first."""
        assert self.host is not None
        self._across = connect_across(divisible(self.network), self._hosts, self.rank)
        return TwoLevels(Levels(self.host, self._across), self._hosts)

    def send(self, tensor: Tensor, to: int, kind: str) -> Work:
        self.check_peer(to)
        counts = {"bytes_sent": tensor.nbytes, "messages": 1}
        if self.host is not None and to in self._neighbours:
            host, place = self.host, self._neighbours.index(to)
            return self._counted(tensor, kind, counts, lambda: host.send(tensor, place, kind))
        return self._counted(
            tensor, kind, counts, lambda: self._beside_host(self.network.send(tensor, to, kind))
        )

    def recv(self, tensor: Tensor, source: int, kind: str) -> Work:
        self.check_peer(source)
        counts = {"bytes_received": tensor.nbytes}
        if self.host is not None and source in self._neighbours:
            host, place = self.host, self._neighbours.index(source)
            return self._counted(tensor, kind, counts, lambda: host.recv(tensor, place, kind))
        return self._counted(
            tensor, kind, counts, lambda: self._beside_host(self.network.recv(tensor, source, kind))
        )

    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        return self._collect(
            tensor,
            kind,
            formulas.broadcast(tensor, self.rank, self.world_size, root),
            lambda fork, flat: fork.two_levels.broadcast(flat, root, kind),
            lambda: self.network.broadcast(tensor, root, kind),
        )

    def reduce_scatter(self, tensor: Tensor, kind: str) -> Work:
        return self._collect(
            tensor,
            kind,
            formulas.reduce_scatter(tensor, self.rank, self.world_size),
            lambda fork, flat: fork.two_levels.reduce_scatter(flat, kind),
            lambda: self.network.reduce_scatter(tensor, kind),
        )

    def all_gather(self, tensor: Tensor, kind: str) -> Work:
        return self._collect(
            tensor,
            kind,
            formulas.all_gather(tensor, self.rank, self.world_size),
            lambda fork, flat: fork.two_levels.all_gather(flat, kind),
            lambda: self.network.all_gather(tensor, kind),
        )

    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        return self._collect(
            tensor,
            kind,
            formulas.all_reduce(tensor, self.rank, self.world_size),
            lambda fork, flat: fork.two_levels.all_reduce(flat, kind),
            lambda: self.network.all_reduce(tensor, kind),
        )

    def fork(self) -> Self:
        host = None if self.host is None else self.host.fork()
        return type(self)(self.network.fork(), host, self._hosts, self.traffic)

    def among(self, ranks: Sequence[int]) -> Communicator:
        """Some of the workers over the network alone; otherwise as `TorchCommunicator.among`."""
        some = divisible(self.network).among(ranks)
        some.traffic = self.traffic
        return some

    def _disconnect(self) -> None:
        for each in (self.host, self._across, self.network):
            if each is not None:
                each.close()

    def _collect(
        self,
        tensor: Tensor,
        kind: str,
        counts: dict[str, int],
        steps: Callable[[HierarchicalCommunicator, Tensor], None],
        flatly: Callable[[], Work],
    ) -> Work:
        def run(fork: Communicator, flat: Tensor) -> None:
            assert isinstance(fork, HierarchicalCommunicator)
            steps(fork, flat)

        def start() -> Work:
            return self._beside_host(self._in_steps(tensor, run) if self._is_even else flatly())

        return self._counted(tensor, kind, counts, start)

    def _counted(
        self, tensor: Tensor, kind: str, counts: dict[str, int], start: Callable[[], Work]
    ) -> Work:
        if tensor.numel() == 0:
            return Done()
        transfer = self.traffic.begin(kind, **counts)
        try:
            work = start()
        except BaseException:
            self.traffic.end(transfer)
            raise
        return self.counted(work, transfer)

    def _beside_host(self, work: Work) -> Work:
        return work if self.host is None else _BesideHost(self.host, work)


class _BesideHost(Work):
    """Work that does not go through the host's memory, while messages may that others wait for."""

    def __init__(self, host: SharedMemoryCommunicator, work: Work) -> None:
        super().__init__()
        self._host, self._work = host, work

    def when_complete(self, action: Callable[[float], None]) -> None:
        self._work.when_complete(action)

    def _block(self) -> None:
        while self._host.is_busy and not self._work.is_done():
            if not self._host.advance():
                sleep(POLL_SECONDS)
        self._work.wait()

    def _poll(self) -> bool:
        self._host.advance()
        return self._work.is_done()
