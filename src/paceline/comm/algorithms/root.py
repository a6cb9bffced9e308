"""Root: everybody sends to rank 0, which sums and sends the sum back.

The first thing one would write, and a good one for two or three workers. Everything goes through
one worker's link, so the time grows with the number of workers.

Order of the sum: ((x0 + x1) + x2) + ..., by rank.
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
        # All receives are posted before the first is waited for: a slow rank holds up no other's
        # transfer, at the price of a buffer for each rank.
        arriving = {peer: torch.empty_like(flat) for peer in communicator.peers}
        receives = {peer: communicator.recv(arriving[peer], peer, kind) for peer in arriving}
        for peer, receive in receives.items():
            receive.wait()
            flat.add_(arriving.pop(peer))
        CombinedWork([communicator.send(flat, peer, kind) for peer in communicator.peers]).wait()

    def bytes_sent(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        copies = (world_size - 1) if rank == 0 else 1
        return copies * elements * element_bytes

    def bytes_received(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        return self.bytes_sent(rank, world_size, elements, element_bytes)

    def cost(self, world_size: int, size_bytes: float, network: Network) -> Cost:
        """The latencies of the peers overlap; their bytes queue at the root's link."""
        peers = world_size - 1
        through_root = peers * size_bytes
        seconds = network.seconds(2, 2 * through_root, through_root) if peers else 0.0
        return Cost(seconds, bytes_sent=through_root, messages=peers)
