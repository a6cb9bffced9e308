"""Two levels of connection: shared memory between the workers of a host, the network across hosts.

Worker i of every host is connected to the workers i of all others: when each of them carries one
chunk of a tensor across, all links carry equal parts.

Collectives on two levels, for hosts of equally many workers; each blocks until it is complete.

Every byte that must leave a host leaves it once, and all workers of a host carry equal parts.

Workers on several hosts: shared memory inside each host, torch.distributed across hosts.

Messages go by shared memory where both workers are on one host, else over the network. Collectives
go on both levels (two_levels.py), in several steps; so they run on a background thread, with
connections of its own. Where hosts have unequal numbers of workers, collectives go over the network
between all of them, as torch.distributed carries them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import sleep
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from paceline.comm import in_process
from paceline.comm.algorithms import ring
from paceline.comm.buffers import chunk, chunk_elements
from paceline.comm.communicator import (
    Communicator,
    all_gather_counts,
    all_reduce_counts,
    broadcast_counts,
    reduce_scatter_counts,
)
from paceline.comm.shm import communicator as shared_memory
from paceline.comm.shm.communicator import SharedMemoryCommunicator
from paceline.comm.work import CompletedWork, Work
from paceline.errors import UsageError
from paceline.measure.traffic import Traffic

Hosts = Sequence[Sequence[int]]
"""The ranks on each host."""


@runtime_checkable
class Divisible(Protocol):
    """A communicator that can connect some of its workers by themselves."""

    def subgroup(self, ranks: Sequence[int]) -> Communicator: ...


@dataclass(frozen=True, slots=True)
class NodeGroups:
    host: Communicator
    """Those on the same host; `host.rank` is this worker's place among them."""
    across: Communicator
    """Those with the same place on all hosts, in the order of their nodes."""

    def close(self) -> None:
        self.host.close()
        self.across.close()


def split_by_node(communicator: Communicator, node: int) -> NodeGroups:
    """Connect the workers on two levels; those who give the same node share memory. Collective."""
    hosts = ranks_by_node(communicator, node)
    if not is_uniform(hosts):
        raise UsageError(
            f"nodes have {', '.join(str(len(ranks)) for ranks in hosts)} workers: to share weights"
            " on each, start as many on every one (--nproc-per-node)"
        )
    if len(hosts) == 1:
        return NodeGroups(shared_memory.connect(communicator), _alone())
    network = divisible(communicator)
    host = connect_host(network, hosts, communicator.rank)
    return NodeGroups(host or _alone(), connect_across(network, hosts, communicator.rank))


def ranks_by_node(communicator: Communicator, node: int) -> Hosts:
    """Who gave the same node, in the nodes' order. Collective."""
    nodes = torch.zeros(communicator.world_size, dtype=torch.int64)
    nodes[communicator.rank] = node
    communicator.all_reduce(nodes, "control").wait()
    return [
        [rank for rank in range(communicator.world_size) if nodes[rank] == number]
        for number in sorted(set(nodes.tolist()))
    ]


def is_uniform(hosts: Hosts) -> bool:
    return len({len(ranks) for ranks in hosts}) == 1


def divisible(communicator: Communicator) -> Divisible:
    if not isinstance(communicator, Divisible):
        raise TypeError("workers on several nodes must have met over torch.distributed")
    return communicator


def connect_host(network: Divisible, hosts: Hosts, rank: int) -> SharedMemoryCommunicator | None:
    """The workers of each host by shared memory; None for one that is alone. Collective."""
    own = next(ranks for ranks in hosts if rank in ranks)
    with network.subgroup(own) as over_network:
        return shared_memory.connect(over_network) if len(own) > 1 else None


def connect_across(network: Divisible, hosts: Hosts, rank: int) -> Communicator:
    """The workers with the same place on all hosts, which are even. Collective."""
    place = next(ranks.index(rank) for ranks in hosts if rank in ranks)
    return network.subgroup([ranks[place] for ranks in hosts])


def _alone() -> Communicator:
    return in_process.InProcessGroup(1).communicators[0]


class TwoLevels:
    """Over the connections of one worker."""

    def __init__(self, levels: NodeGroups, hosts: Hosts) -> None:
        self._host, self._across = levels.host, levels.across
        self._hosts = hosts
        self._rank = hosts[levels.across.rank][levels.host.rank]

    def all_reduce(self, flat: Tensor, kind: str) -> None:
        """In each host; worker i sums chunk i with the workers i of the others; back again."""
        self._host.reduce_scatter(flat, kind).wait()
        self._across.all_reduce(self._own_chunk(flat), kind).wait()
        self._host.all_gather(flat, kind).wait()

    def broadcast(self, flat: Tensor, root: int, kind: str) -> None:
        """Through the root's host; worker i hands chunk i to the others'; there to everybody."""
        first = next(number for number, ranks in enumerate(self._hosts) if root in ranks)
        if self._across.rank == first:
            self._host.broadcast(flat, self._hosts[first].index(root), kind).wait()
        self._across.broadcast(self._own_chunk(flat), first, kind).wait()
        if self._across.rank != first:
            self._host.all_gather(flat, kind).wait()

    def reduce_scatter(self, flat: Tensor, kind: str) -> None:
        """As all_reduce, without the way back."""
        dealt = self._dealt(flat)
        for part, place in self._parts(flat, dealt):
            place.copy_(part)
        self._host.reduce_scatter(dealt, kind).wait()
        ring.reduce_scatter(self._across, self._own_chunk(dealt), kind)
        own, place = self._parts(flat, dealt)[self._rank]
        own.copy_(place)

    def all_gather(self, flat: Tensor, kind: str) -> None:
        """The way back alone."""
        dealt = self._dealt(flat)
        own, place = self._parts(flat, dealt)[self._rank]
        place.copy_(own)
        self._across.all_gather(self._own_chunk(dealt), kind).wait()
        self._host.all_gather(dealt, kind).wait()
        for part, place in self._parts(flat, dealt):
            part.copy_(place)

    def _own_chunk(self, flat: Tensor) -> Tensor:
        return chunk(flat, self._host.world_size, self._host.rank)

    def _dealt(self, flat: Tensor) -> Tensor:
        """Room for the chunks of all ranks, every one as large as the first."""
        ranks = self._host.world_size * self._across.world_size
        return flat.new_zeros(ranks * chunk_elements(flat.numel(), ranks, 0))

    def _parts(self, flat: Tensor, dealt: Tensor) -> list[tuple[Tensor, Tensor]]:
        """By rank, its chunk and the place of that in `dealt`, where the chunks of those who have
        the same place on their hosts follow one another."""
        ranks = self._host.world_size * self._across.world_size
        parts = []
        for rank in range(ranks):
            number, place = next(
                (number, ranks_there.index(rank))
                for number, ranks_there in enumerate(self._hosts)
                if rank in ranks_there
            )
            part = chunk(flat, ranks, rank)
            slot = chunk(dealt, ranks, place * self._across.world_size + number)
            parts.append((part, slot[: part.numel()]))
        return parts


POLL_SECONDS = 0.0002


def connect(communicator: Communicator, node: int) -> Communicator:
    """The quickest connection between workers; those who give the same node share memory.

    Collective. It counts into the same traffic, and needs the communicator given no more once it is
    made. On one host it is shared memory itself, and for hosts of one worker each the network.
    """
    hosts = ranks_by_node(communicator, node)
    if len(hosts) == 1:
        return shared_memory.connect(communicator)
    network = communicator.dup()
    if all(len(ranks) == 1 for ranks in hosts):
        return network
    network.traffic = Traffic()
    host = connect_host(divisible(network), hosts, network.rank)
    if host is not None:
        host.traffic = Traffic()
    return HierarchicalCommunicator(network, host, hosts, communicator.traffic)


class HierarchicalCommunicator(Communicator):
    """Made by `connect`.

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
            rank, network.world_size, network.timeout_seconds, traffic, network.global_ranks
        )
        self.network, self.host, self._hosts = network, host, hosts
        self._neighbours = next(ranks for ranks in hosts if rank in ranks)
        """Those on the same host, in the order of their places."""
        self._is_even = is_uniform(hosts)
        self._across: Communicator | None = None

    @cached_property
    def two_levels(self) -> TwoLevels:
        """Of hosts with equally many workers, more than one each. Collective at first."""
        assert self.host is not None
        self._across = connect_across(divisible(self.network), self._hosts, self.rank)
        return TwoLevels(NodeGroups(self.host, self._across), self._hosts)

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
            broadcast_counts(tensor, self.rank, self.world_size, root),
            lambda fork, flat: fork.two_levels.broadcast(flat, root, kind),
            lambda: self.network.broadcast(tensor, root, kind),
        )

    def reduce_scatter(self, tensor: Tensor, kind: str) -> Work:
        return self._collect(
            tensor,
            kind,
            reduce_scatter_counts(tensor, self.rank, self.world_size),
            lambda fork, flat: fork.two_levels.reduce_scatter(flat, kind),
            lambda: self.network.reduce_scatter(tensor, kind),
        )

    def all_gather(self, tensor: Tensor, kind: str) -> Work:
        return self._collect(
            tensor,
            kind,
            all_gather_counts(tensor, self.rank, self.world_size),
            lambda fork, flat: fork.two_levels.all_gather(flat, kind),
            lambda: self.network.all_gather(tensor, kind),
        )

    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        return self._collect(
            tensor,
            kind,
            all_reduce_counts(tensor, self.rank, self.world_size),
            lambda fork, flat: fork.two_levels.all_reduce(flat, kind),
            lambda: self.network.all_reduce(tensor, kind),
        )

    def dup(self) -> Self:
        host = None if self.host is None else self.host.dup()
        return type(self)(self.network.dup(), host, self._hosts, self.traffic)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """Some of the workers over the network alone; otherwise as `TorchCommunicator.among`."""
        some = divisible(self.network).subgroup(ranks)
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
            return self._beside_host(
                self._in_background(tensor, run) if self._is_even else flatly()
            )

        return self._counted(tensor, kind, counts, start)

    def _counted(
        self, tensor: Tensor, kind: str, counts: dict[str, int], start: Callable[[], Work]
    ) -> Work:
        if tensor.numel() == 0:
            return CompletedWork()
        transfer = self.traffic.begin(kind, **counts)
        try:
            work = start()
        except BaseException:
            self.traffic.end(transfer)
            raise
        return self.track_transfer(work, transfer)

    def _beside_host(self, work: Work) -> Work:
        return work if self.host is None else ShmProgressingWork(self.host, work)


class ShmProgressingWork(Work):
    """Work that does not go through the host's memory, while messages may that others wait for."""

    def __init__(self, host: SharedMemoryCommunicator, work: Work) -> None:
        super().__init__()
        self._host, self._work = host, work

    def add_done_callback(self, action: Callable[[float], None]) -> None:
        self._work.add_done_callback(action)

    def _block(self) -> None:
        while self._host.is_busy and not self._work.is_completed():
            if not self._host.progress():
                sleep(POLL_SECONDS)
        self._work.wait()

    def _poll(self) -> bool:
        self._host.progress()
        return self._work.is_completed()
