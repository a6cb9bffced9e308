"""Root: all ranks send to rank 0, which sums and sends the sum back.

Simple, and fast enough for two or three ranks. All data passes through the link of one rank, so
the time grows linearly with the number of ranks.

Order of summation: ((x0 + x1) + x2) + ..., by rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.comm.algorithms.base import Algorithm
from paceline.comm.cost import Cost, Network
from paceline.comm.work import CombinedWork

if TYPE_CHECKING:
    from paceline.comm.communicator import Communicator


class Root(Algorithm):
    def all_reduce(self, communicator: Communicator, tensor: Tensor, kind: str) -> None:
        flat = tensor.view(-1)
        if communicator.rank != 0:
            communicator.send(flat, 0, kind).wait()
            communicator.recv(flat, 0, kind).wait()
            return
        # Start all receives before the first wait, so that a slow rank does not delay the other
        # transfers. This costs one buffer per rank.
        incoming = {peer: torch.empty_like(flat) for peer in communicator.peers}
        receives = {peer: communicator.recv(incoming[peer], peer, kind) for peer in incoming}
        for peer, receive in receives.items():
            receive.wait()
            flat.add_(incoming.pop(peer))
        CombinedWork([communicator.send(flat, peer, kind) for peer in communicator.peers]).wait()

    def bytes_sent(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        copies = (world_size - 1) if rank == 0 else 1
        return copies * elements * element_bytes

    def bytes_received(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        return self.bytes_sent(rank, world_size, elements, element_bytes)

    def cost(self, world_size: int, size_bytes: float, network: Network) -> Cost:
        """Return the cost: latencies of the peers overlap, but their bytes share the link of rank
        0."""
        peers = world_size - 1
        through_root = peers * size_bytes
        seconds = network.seconds(2, 2 * through_root, through_root) if peers else 0.0
        return Cost(seconds, bytes_sent=through_root, messages=peers)
