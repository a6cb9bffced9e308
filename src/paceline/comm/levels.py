"""Two levels of connection: shared memory between the workers of a host, the network across hosts.

Worker i of every host is connected to the workers i of all others: when each of them carries one
chunk of a tensor across, all links carry equal parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.comm import in_process, shared_memory
from paceline.comm.communicator import Communicator
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.errors import UsageError


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
    rank, world_size = communicator.rank, communicator.world_size
    nodes = torch.zeros(world_size, dtype=torch.int64)
    nodes[rank] = node
    communicator.all_reduce(nodes, "control").wait()
    hosts = [
        [each for each in range(world_size) if nodes[each] == number]
        for number in sorted(set(nodes.tolist()))
    ]
    if len({len(ranks) for ranks in hosts}) > 1:
        raise UsageError(
            f"nodes have {', '.join(str(len(ranks)) for ranks in hosts)} workers: to share weights"
            " on each, start as many on every one (--nproc-per-node)"
        )
    if len(hosts) == 1:
        return Levels(shared_memory.over(communicator), _alone())
    own = next(ranks for ranks in hosts if rank in ranks)
    if not isinstance(communicator, TorchCommunicator):
        raise TypeError("workers on several nodes must have met over torch.distributed")
    place = own.index(rank)
    across = communicator.among([ranks[place] for ranks in hosts])
    if len(own) == 1:
        return Levels(_alone(), across)
    with communicator.among(own) as over_network:
        return Levels(shared_memory.over(over_network), across)


def _alone() -> Communicator:
    return in_process.Hub(1).communicators[0]
