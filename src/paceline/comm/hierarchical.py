"""Communicator for multiple nodes: shared memory within each node, torch.distributed across nodes.

Messages between two ranks of a node use shared memory; all others use the network. Collectives use
both levels. Local rank i of a node is connected to local rank i of every other node and transfers
chunk i of each tensor, so each byte crosses the network once and all links carry equal shares. The
steps of a collective run on a communication thread that has its own connections. If nodes have
different numbers of ranks, torch.distributed performs the collectives over the network between all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import sleep
from typing import Self

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
from paceline.comm.objects import all_gather_scalars
from paceline.comm.shm import communicator as shared_memory
from paceline.comm.shm.communicator import SharedMemoryCommunicator
from paceline.comm.work import CompletedWork, Work
from paceline.errors import UsageError
from paceline.measure.timeline import Moment
from paceline.measure.traffic import Traffic

POLL_SECONDS = 0.0002


class NodeLayout:
    """The ranks of each node, in node order."""

    def __init__(self, ranks_by_node: Sequence[Sequence[int]]) -> None:
        self.ranks_by_node = ranks_by_node
        self.is_uniform = len({len(ranks) for ranks in ranks_by_node}) == 1
        """Whether all nodes have the same number of ranks."""
        self._positions = {
            rank: (node, local_rank)
            for node, ranks in enumerate(ranks_by_node)
            for local_rank, rank in enumerate(ranks)
        }

    @classmethod
    def discover(cls, communicator: Communicator, node: int) -> NodeLayout:
        """Group the ranks that pass the same `node`. Collective."""
        nodes = all_gather_scalars(communicator, torch.tensor(node)).tolist()
        return cls(
            [
                [rank for rank in range(communicator.world_size) if nodes[rank] == each]
                for each in sorted(set(nodes))
            ]
        )

    def position(self, rank: int) -> tuple[int, int]:
        """Return the node index and the local rank of a rank."""
        return self._positions[rank]

    def intra_node_ranks(self, rank: int) -> Sequence[int]:
        """Return the ranks on the same node as `rank`, ordered by local rank."""
        return self.ranks_by_node[self.position(rank)[0]]

    def inter_node_ranks(self, rank: int) -> Sequence[int]:
        """Return the ranks with the same local rank on every node. Requires a uniform layout."""
        local_rank = self.position(rank)[1]
        return [ranks[local_rank] for ranks in self.ranks_by_node]


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """The intra-node and inter-node groups of a rank. All nodes have the same number of ranks."""

    intra_node: Communicator
    """The ranks of the same node; its `rank` is the local rank."""
    inter_node: Communicator
    """The ranks with the same local rank on all nodes, in node order."""

    def close(self) -> None:
        self.intra_node.close()
        self.inter_node.close()


def split_by_node(communicator: Communicator, node: int) -> NodeGroups:
    """Connect ranks with the same `node` through shared memory, and all others over the network.

    Collective. Raises UsageError if nodes have different numbers of ranks.
    """
    layout = NodeLayout.discover(communicator, node)
    if not layout.is_uniform:
        counts = ", ".join(str(len(ranks)) for ranks in layout.ranks_by_node)
        raise UsageError(
            f"nodes have different numbers of workers ({counts}): to share weights on each node,"
            " start the same number of workers on every node (--nproc-per-node)"
        )
    if len(layout.ranks_by_node) == 1:
        return NodeGroups(shared_memory.connect(communicator), in_process.single())
    intra_node = _connect_intra_node(communicator, layout, communicator.traffic)
    inter_node = communicator.subgroup(layout.inter_node_ranks(communicator.rank))
    return NodeGroups(intra_node or in_process.single(), inter_node)


def connect(bootstrap: Communicator, node: int) -> Communicator:
    """Create the fastest available communicator. Collective.

    Ranks that pass the same `node` use shared memory. Transfers are counted in the traffic of
    `bootstrap`, which may be closed afterward. The result uses only shared memory on a single node,
    and only the network if every node has one rank.
    """
    layout = NodeLayout.discover(bootstrap, node)
    if len(layout.ranks_by_node) == 1:
        return shared_memory.connect(bootstrap)
    if all(len(ranks) == 1 for ranks in layout.ranks_by_node):
        return bootstrap.dup()
    network = bootstrap.dup(traffic=Traffic())
    intra_node = _connect_intra_node(network, layout, Traffic())
    return HierarchicalCommunicator(network, intra_node, layout, bootstrap.traffic)


def _connect_intra_node(
    network: Communicator, layout: NodeLayout, traffic: Traffic
) -> SharedMemoryCommunicator | None:
    """Connect the ranks of each node through shared memory. Collective.

    Returns None on a node with one rank. The only rank of a node also creates a subgroup, because
    subgroups are numbered and all ranks must create the same number of them.
    """
    ranks = layout.intra_node_ranks(network.rank)
    with network.subgroup(ranks) as bootstrap:
        return shared_memory.connect(bootstrap, traffic) if len(ranks) > 1 else None


class HierarchicalCommunicator(Communicator):
    """Created by `connect`.

    `traffic` counts operations as defined by the `Communicator` contract. `network.traffic` counts
    the bytes sent across nodes, and `intra_node.traffic` those within the node.
    """

    def __init__(
        self,
        network: Communicator,
        intra_node: SharedMemoryCommunicator | None,
        layout: NodeLayout,
        traffic: Traffic,
    ) -> None:
        """`network` connects all ranks; `intra_node` is None on a node with one rank."""
        super().__init__(
            network.rank, network.world_size, network.timeout_seconds, traffic, network.global_ranks
        )
        self.network, self.intra_node, self._layout = network, intra_node, layout
        self._node, self._local_rank = layout.position(network.rank)
        self._groups: NodeGroups | None = None

    def send(self, tensor: Tensor, to: int, kind: str) -> Work:
        self.check_peer(to)
        node, local_rank = self._layout.position(to)

        def start() -> Work:
            if self.intra_node is not None and node == self._node:
                return self.intra_node.send(tensor, local_rank, kind)
            return self._with_shm_progress(self.network.send(tensor, to, kind))

        return self._counted(tensor, kind, {"bytes_sent": tensor.nbytes, "messages": 1}, start)

    def recv(self, tensor: Tensor, source: int, kind: str) -> Work:
        self.check_peer(source)
        node, local_rank = self._layout.position(source)

        def start() -> Work:
            if self.intra_node is not None and node == self._node:
                return self.intra_node.recv(tensor, local_rank, kind)
            return self._with_shm_progress(self.network.recv(tensor, source, kind))

        return self._counted(tensor, kind, {"bytes_received": tensor.nbytes}, start)

    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        return self._collective(
            tensor,
            kind,
            broadcast_counts(tensor, self.rank, self.world_size, root),
            lambda duplicate, flat: duplicate._two_level_broadcast(flat, root, kind),
            lambda: self.network.broadcast(tensor, root, kind),
        )

    def reduce_scatter(self, tensor: Tensor, kind: str) -> Work:
        return self._collective(
            tensor,
            kind,
            reduce_scatter_counts(tensor, self.rank, self.world_size),
            lambda duplicate, flat: duplicate._two_level_reduce_scatter(flat, kind),
            lambda: self.network.reduce_scatter(tensor, kind),
        )

    def all_gather(self, tensor: Tensor, kind: str) -> Work:
        return self._collective(
            tensor,
            kind,
            all_gather_counts(tensor, self.rank, self.world_size),
            lambda duplicate, flat: duplicate._two_level_all_gather(flat, kind),
            lambda: self.network.all_gather(tensor, kind),
        )

    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        return self._collective(
            tensor,
            kind,
            all_reduce_counts(tensor, self.rank, self.world_size),
            lambda duplicate, flat: duplicate._two_level_all_reduce(flat, kind),
            lambda: self.network.all_reduce(tensor, kind),
        )

    def dup(self, traffic: Traffic | None = None) -> Self:
        network = self.network.dup()
        intra_node = None if self.intra_node is None else self.intra_node.dup()
        return type(self)(network, intra_node, self._layout, traffic or self.traffic)

    def subgroup(self, ranks: Sequence[int], traffic: Traffic | None = None) -> Communicator:
        """Create a communicator over a subset of ranks. It uses only the network."""
        return self.network.subgroup(ranks, traffic or self.traffic)

    def _disconnect(self) -> None:
        if self.intra_node is not None:
            self.intra_node.close()
        if self._groups is not None:
            self._groups.inter_node.close()
        self.network.close()

    def _collective(
        self,
        tensor: Tensor,
        kind: str,
        counts: dict[str, int],
        two_level: Callable[[HierarchicalCommunicator, Tensor], None],
        network_only: Callable[[], Work],
    ) -> Work:
        def run(duplicate: Communicator, flat: Tensor) -> None:
            assert isinstance(duplicate, HierarchicalCommunicator)
            two_level(duplicate, flat)

        def start() -> Work:
            is_uniform = self._layout.is_uniform
            work = self._in_background(tensor, run) if is_uniform else network_only()
            return self._with_shm_progress(work)

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

    def _with_shm_progress(self, work: Work) -> Work:
        return work if self.intra_node is None else ShmProgressingWork(self.intra_node, work)

    def _node_groups(self) -> NodeGroups:
        """Return the groups for two-level collectives. Collective on first use.

        Only the duplicate of the communication thread calls this, so a communicator that runs no
        collectives never connects the inter-node group.
        """
        if self._groups is None:
            assert self.intra_node is not None
            inter_node = self.network.subgroup(self._layout.inter_node_ranks(self.rank))
            self._groups = NodeGroups(self.intra_node, inter_node)
        return self._groups

    def _two_level_all_reduce(self, flat: Tensor, kind: str) -> None:
        """Reduce-scatter within the node, all-reduce across nodes, all-gather within the node."""
        groups = self._node_groups()
        groups.intra_node.reduce_scatter(flat, kind).wait()
        groups.inter_node.all_reduce(self._local_chunk(flat), kind).wait()
        groups.intra_node.all_gather(flat, kind).wait()

    def _two_level_broadcast(self, flat: Tensor, root: int, kind: str) -> None:
        """Broadcast within the root's node, then across nodes, and all-gather within other nodes.

        Each local rank broadcasts one chunk across nodes.
        """
        groups = self._node_groups()
        root_node, root_local_rank = self._layout.position(root)
        if self._node == root_node:
            groups.intra_node.broadcast(flat, root_local_rank, kind).wait()
        groups.inter_node.broadcast(self._local_chunk(flat), root_node, kind).wait()
        if self._node != root_node:
            groups.intra_node.all_gather(flat, kind).wait()

    def _two_level_reduce_scatter(self, flat: Tensor, kind: str) -> None:
        """Reduce-scatter within the node, then across nodes."""
        groups = self._node_groups()
        padded = self._padded(flat)
        for own, target in self._chunk_pairs(flat, padded):
            target.copy_(own)
        groups.intra_node.reduce_scatter(padded, kind).wait()
        ring.reduce_scatter(groups.inter_node, self._local_chunk(padded), kind)
        own, target = self._chunk_pairs(flat, padded)[self.rank]
        own.copy_(target)

    def _two_level_all_gather(self, flat: Tensor, kind: str) -> None:
        """All-gather across nodes, then within the node."""
        groups = self._node_groups()
        padded = self._padded(flat)
        own, target = self._chunk_pairs(flat, padded)[self.rank]
        target.copy_(own)
        groups.inter_node.all_gather(self._local_chunk(padded), kind).wait()
        groups.intra_node.all_gather(padded, kind).wait()
        for own, target in self._chunk_pairs(flat, padded):
            own.copy_(target)

    def _local_chunk(self, flat: Tensor) -> Tensor:
        """Return the chunk that this rank transfers across nodes."""
        return chunk(flat, len(self._layout.ranks_by_node[self._node]), self._local_rank)

    def _padded(self, flat: Tensor) -> Tensor:
        """Return zeros for one chunk per rank, each as large as the first chunk of `flat`."""
        return flat.new_zeros(self.world_size * chunk_elements(flat.numel(), self.world_size, 0))

    def _chunk_pairs(self, flat: Tensor, padded: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return, for each rank, its chunk of `flat` and the corresponding part of `padded`.

        In `padded`, the chunks of ranks with the same local rank are adjacent, so that they form
        the local chunk of these ranks.
        """
        nodes = len(self._layout.ranks_by_node)
        pairs = []
        for rank in range(self.world_size):
            node, local_rank = self._layout.position(rank)
            own = chunk(flat, self.world_size, rank)
            target = chunk(padded, self.world_size, local_rank * nodes + node)
            pairs.append((own, target[: own.numel()]))
        return pairs


class ShmProgressingWork(Work):
    """A network operation whose `wait` also makes progress on shared-memory messages.

    Otherwise a peer could wait for a shared-memory message from this rank while this rank waits for
    the network.
    """

    def __init__(self, intra_node: SharedMemoryCommunicator, work: Work) -> None:
        super().__init__()
        self._intra_node, self._work = intra_node, work

    def add_done_callback(self, action: Callable[[Moment], None]) -> None:
        self._work.add_done_callback(action)

    def _block(self) -> None:
        while self._intra_node.is_busy and not self._work.is_completed():
            if not self._intra_node.progress():
                sleep(POLL_SECONDS)
        self._work.wait()

    def _poll(self) -> bool:
        self._intra_node.progress()
        return self._work.is_completed()
