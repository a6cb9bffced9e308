"""The `shared` strategy: ranks of a host share one copy of weights and optimizer state.

Each rank reads the same weights. After the backward pass it publishes its gradients in shared
memory. Rank i of a host sums shard i of all gradients and updates shard i of the weights. The host
therefore runs each update once instead of once per rank, and stores weights and optimizer state
once. A gradient is copied at most once, because a rank sums its own gradients in place.

Large linear layers publish factors instead (linear_factors.py). Small models have fewer shards than
ranks, because a shard must be large enough to justify waking a rank. If one rank updates
everything, all backward passes write directly to shared memory (`InPlaceGradients`).

Across hosts, the ranks with equal local rank all-reduce their shard, which balances the traffic
over all links. Each host then updates its own copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.comm.buffers import chunk
from paceline.comm.communicator import Communicator
from paceline.comm.cost import Cost, Network
from paceline.comm.hierarchical import NodeGroups, split_by_node
from paceline.comm.shm.segment import SharedSegment, aligned_offsets
from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.strategies.flat_buffer import FlatBuffer, padded_bytes
from paceline.strategies.replica import Replica
from paceline.strategies.sharded import (
    ParameterShard,
    ShardedCheckpointState,
    ShardedOptimizer,
    check_shardable,
    optimizer_weights,
    shards_of_chunk,
)
from paceline.strategies.shared.gradients import (
    InPlaceGradients,
    PublishedGradients,
    SharedGradients,
)
from paceline.strategies.shared.linear_factors import (
    LinearGradientFactors,
    factor_bytes,
    layers_to_factor,
)
from paceline.strategies.strategy import ModelShape, Strategy, check_elementwise

MIN_SHARD_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Offsets in the shared segment of one host, in bytes."""

    shards: int
    """Number of ranks that update weights."""
    buffer_bytes: int
    """Size of the weights, and of each rank's gradients."""
    weights: int
    gradients: tuple[int, ...]
    """By local rank."""
    factors: tuple[int, ...]
    """By factored layer; one block per rank starts at each offset."""
    total_bytes: int

    @classmethod
    def of(
        cls, weights: Sequence[nn.Parameter], ranks: int, layers: Sequence[nn.Linear]
    ) -> SegmentLayout:
        """Lay out the segment for the ranks of a host and the layers that publish factors."""
        shards = shard_count(weights, ranks)
        buffer_bytes = padded_bytes([weight.nbytes for weight in weights], shards)
        layer_bytes = [ranks * factor_bytes(layer) for layer in layers]
        offsets, total_bytes = aligned_offsets([*([buffer_bytes] * (1 + ranks)), *layer_bytes])
        return cls(
            shards=shards,
            buffer_bytes=buffer_bytes,
            weights=offsets[0],
            gradients=tuple(offsets[1 : 1 + ranks]),
            factors=tuple(offsets[1 + ranks :]),
            total_bytes=total_bytes,
        )


def shard_count(weights: Sequence[nn.Parameter], ranks: int) -> int:
    """Return the number of ranks of a host that update weights."""
    return min(ranks, max(1, sum(weight.nbytes for weight in weights) // MIN_SHARD_BYTES))


class SharedWeights(Strategy):
    """Shares weights and optimizer state among the ranks of a host."""

    reports_own_gradients = True

    def check(self, config: RunConfig) -> list[str]:
        return check_elementwise(config)

    def setup(self, replica: Replica) -> None:
        check_shardable(replica.optimizer, "shared")
        self._trained = optimizer_weights(replica.optimizer)
        if self._trained[0].device.type != "cpu":
            raise ConfigError(
                ["--strategy shared: requires weights in main memory: use --device cpu"]
            )
        super().setup(replica)
        self._groups = split_by_node(replica.communicator, replica.node)
        self._share_memory(self._groups)
        self.checkpoint = SharedCheckpointState(replica, self._optimizer, self._groups.intra_node)
        self._groups.intra_node.barrier().wait()

    def _share_memory(self, groups: NodeGroups) -> None:
        weights = self._trained
        local_rank, ranks = groups.intra_node.rank, groups.intra_node.world_size
        is_in_place = ranks > 1 and shard_count(weights, ranks) == 1
        layers = [] if is_in_place else self._layers_to_factor()
        layout = SegmentLayout.of(weights, ranks, layers)
        segment = SharedSegment(groups.intra_node, layout.total_bytes)

        def buffer(position: int) -> FlatBuffer:
            elements = layout.buffer_bytes // weights[0].element_size()
            memory = segment.tensor(position, elements, weights[0].dtype)
            return FlatBuffer(weights, shards=layout.shards, memory=memory)

        values = buffer(layout.weights)
        gradients = [buffer(position) for position in layout.gradients]
        # All ranks of a host write the same values; a barrier follows before any update.
        values.hold_weights()
        shards: list[ParameterShard] = []
        self._shard_gradients = torch.empty(0)
        """The summed gradients of this rank's shard, to be reduced across hosts."""
        if local_rank < layout.shards:
            own = gradients[local_rank]
            shards = shards_of_chunk(weights, values, own, local_rank, layout.shards)
        if shards:
            self._shard_gradients = chunk(gradients[local_rank].tensor, layout.shards, local_rank)
        self._gradients: SharedGradients
        if is_in_place:
            self._gradients = InPlaceGradients(weights, gradients, local_rank)
        else:
            indices = {id(weight): index for index, weight in enumerate(weights)}
            self._gradients = PublishedGradients(
                self.replica,
                weights,
                shards,
                gradients,
                local_rank,
                {
                    indices[id(layer.weight)]: LinearGradientFactors(
                        layer, segment, position, local_rank, ranks
                    )
                    for layer, position in zip(layers, layout.factors, strict=True)
                },
                sums_are_contiguous=groups.inter_node.world_size > 1,
            )
        self._optimizer = ShardedOptimizer(self.replica, weights, shards, groups.intra_node)
        # A rank that updates all shards does not wait: no other rank changes what it reads, and a
        # shared-memory barrier counts a rank's arrival when the rank starts it.
        self._must_wait_for_update = layout.shards > 1 or local_rank > 0

    def _layers_to_factor(self) -> list[nn.Linear]:
        """Return the layers that publish factors; none if compiled or for a single rank."""
        replica = self.replica
        if replica.forward is not replica.model or self._groups.intra_node.world_size == 1:
            return []
        return layers_to_factor(replica.model, self._trained)

    def step(self) -> None:
        replica, host = self.replica, self._groups.intra_node
        with replica.exposed_communication():
            self._sum_shard()
        self._optimizer.update()
        self._gradients.drop_sums()
        with replica.exposed_communication():
            updated = host.barrier()
            if self._must_wait_for_update:
                updated.wait()
        replica.clock.enter("update")
        self._gradients.reset()

    def _sum_shard(self) -> None:
        groups, traffic = self._groups, self.replica.communicator.traffic
        published_bytes = self._gradients.publish()
        if self.replica.noise.wants_own:
            self._gradients.measure_own(self.replica.noise)
        publishing = traffic.begin(
            "gradients", bytes_sent=published_bytes, messages=bool(published_bytes)
        )
        published = groups.intra_node.barrier()
        if self._shard_gradients.numel():
            published.wait()
            read_bytes = self._gradients.reduce()
            traffic.end(traffic.begin("gradients", bytes_received=read_bytes))
        traffic.end(publishing)
        groups.inter_node.all_reduce(self._shard_gradients, "gradients").wait()

    def finish(self) -> None:
        for weight in self._trained:
            weight.data = weight.data.clone(memory_format=torch.preserve_format)
        self._gradients.detach()
        # The segment may be closed only after all ranks have copied their weights.
        self._groups.intra_node.barrier().wait()
        self._groups.close()
        # The final checkpoint may follow.
        self._optimizer.gather_over(self.replica.communicator)

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """Return the cost on one host: two barriers, and one shard read from each other rank."""
        peers = shape.workers - 1
        size_bytes = padded_bytes(shape.tensor_bytes, shape.workers)
        moved = peers * size_bytes / shape.workers
        messages = 2 if peers else 0
        return Cost(network.seconds(messages, moved, moved), bytes_sent=moved, messages=peers)


class SharedCheckpointState(ShardedCheckpointState):
    """Checkpoint state of ranks that share one copy of the weights per host."""

    def __init__(self, replica: Replica, optimizer: ShardedOptimizer, host: Communicator) -> None:
        super().__init__(replica, optimizer)
        self._host = host

    def load_model_state_dict(self, state: dict[str, Any]) -> None:
        # All ranks write the same values, but only after all have read the previous ones.
        self._host.barrier().wait()
        super().load_model_state_dict(state)
        self._host.barrier().wait()
