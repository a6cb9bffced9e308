"""Two levels of connection: shared memory between the workers of a host, the network across hosts.

Worker i of every host is connected to the workers i of all others: when each of them carries one
chunk of a tensor across, all links carry equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from paceline.comm import in_process, shared_memory
from paceline.comm.communicator import Communicator
from paceline.comm.shared_memory import SharedMemoryCommunicator
from paceline.errors import UsageError

Hosts = Sequence[Sequence[int]]
"""The ranks on each host."""


@runtime_checkable
class Divisible(Protocol):
    """A communicator that can connect some of its workers by themselves."""

    def among(self, ranks: Sequence[int]) -> Communicator: ...


@dataclass(frozen=True, slots=True)
class Levels:
    host: Communicator
    """Those on the same host; `host.rank` is this worker's place among them."""
    across: Communicator
    """Those with the same place on all hosts, in the order of their nodes."""

    def close(self) -> None:
        self.host.close()
        self.across.close()


def split(communicator: Communicator, node: int) -> Levels:
    """Connect the workers on two levels; those who give the same node share memory. Collective."""
    hosts = find_hosts(communicator, node)
    if not are_even(hosts):
        raise UsageError(
            f"nodes have {', '.join(str(len(ranks)) for ranks in hosts)} workers: to share weights"
            " on each, start as many on every one (--nproc-per-node)"
        )
    if len(hosts) == 1:
        return Levels(shared_memory.over(communicator), _alone())
    network = divisible(communicator)
    host = connect_host(network, hosts, communicator.rank)
    return Levels(host or _alone(), connect_across(network, hosts, communicator.rank))


def find_hosts(communicator: Communicator, node: int) -> Hosts:
    """Who gave the same node, in the nodes' order. Collective."""
    nodes = torch.zeros(communicator.world_size, dtype=torch.int64)
    nodes[communicator.rank] = node
    communicator.all_reduce(nodes, "control").wait()
    return [
        [rank for rank in range(communicator.world_size) if nodes[rank] == number]
        for number in sorted(set(nodes.tolist()))
    ]


def are_even(hosts: Hosts) -> bool:
    return len({len(ranks) for ranks in hosts}) == 1


def divisible(communicator: Communicator) -> Divisible:
    if not isinstance(communicator, Divisible):
        raise TypeError("workers on several nodes must have met over torch.distributed")
    return communicator


def connect_host(network: Divisible, hosts: Hosts, rank: int) -> SharedMemoryCommunicator | None:
    """The workers of each host by shared memory; None for one that is alone. Collective."""
    own = next(ranks for ranks in hosts if rank in ranks)
    with network.among(own) as over_network:
        return shared_memory.over(over_network) if len(own) > 1 else None


def connect_across(network: Divisible, hosts: Hosts, rank: int) -> Communicator:
    """The workers with the same place on all hosts, which are even. Collective."""
    place = next(ranks.index(rank) for ranks in hosts if rank in ranks)
    return network.among([ranks[place] for ranks in hosts])


def _alone() -> Communicator:
    return in_process.Hub(1).communicators[0]
