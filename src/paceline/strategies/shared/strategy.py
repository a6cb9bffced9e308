"""One copy of the weights per host, in memory that its workers share.

Every worker's model reads the same weights. After the backward pass each worker deposits its
gradients where the others can read them. Worker i sums chunk i of all of them and applies the
optimizer to chunk i of the weights; its state of that chunk is the only one on the host. So the
update is done once instead of once a worker, weights and state take one worker's memory instead of
everybody's, and a gradient is copied once at most: what a worker sums it reads where it lies.
Large linear layers get by with less (factors.py). Small models have fewer chunks than workers,
since a chunk must be worth waking a worker for; where one worker updates everything, the backward
passes of all add up their gradients where it reads them (accumulated.py).

Two meetings keep this right: a chunk is summed when all have deposited theirs, and weights are read
when all chunks are updated.

Across hosts, worker i exchanges the sum of chunk i with the workers i of the other hosts, so that
all links carry equal parts; then every host updates its own copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.comm.buffers import chunk
from paceline.comm.communicator import Communicator
from paceline.comm.cost import Cost, Network
from paceline.comm.hierarchical import NodeGroups, split_by_node
from paceline.comm.shm.segment import SharedSegment, aligned_offsets
from paceline.errors import ConfigError
from paceline.strategies.flat_buffer import FlatBuffer, padded_bytes
from paceline.strategies.replica import Replica
from paceline.strategies.sharded import (
    ParameterShard,
    ShardedCheckpointState,
    ShardedOptimizer,
    check_shardable,
    optimizer_weights,
    pieces_of_chunk,
)
from paceline.strategies.shared.gradients import InPlaceGradients, PublishedGradients
from paceline.strategies.shared.linear_factors import (
    LinearGradientFactors,
    layers_to_factor,
    memory_bytes,
)
from paceline.strategies.strategy import ModelShape, Strategy

LEAST_CHUNK_BYTES = 512 * 1024


class SharedCheckpointState(ShardedCheckpointState):
    """State of ranks that share one copy of the weights per host."""

    def __init__(self, replica: Replica, optimizer: ShardedOptimizer, host: Communicator) -> None:
        super().__init__(replica, optimizer)
        self._host = host

    def load_model_state_dict(self, state: dict[str, Any]) -> None:
        # All ranks write the same values, but none while another still reads the previous ones.
        self._host.barrier().wait()
        super().load_model_state_dict(state)
        self._host.barrier().wait()


class SharedWeights(Strategy):
    def setup(self, replica: Replica) -> None:
        check_shardable(replica.optimizer, "shared")
        self._trained = optimizer_weights(replica.optimizer)
        if self._trained[0].device.type != "cpu":
            raise ConfigError(
                ["--strategy shared: weights are shared in main memory: use --device cpu"]
            )
        super().setup(replica)
        self._levels = split_by_node(replica.communicator, replica.node)
        self._share_memory(self._levels)
        self.checkpoint = SharedCheckpointState(replica, self._own, self._levels.intra_node)
        self._levels.intra_node.barrier().wait()

    def _share_memory(self, levels: NodeGroups) -> None:
        replica, weights = self.replica, self._trained
        place, workers = levels.intra_node.rank, levels.intra_node.world_size
        sizes = [weight.nbytes for weight in weights]
        chunks = min(workers, max(1, sum(sizes) // LEAST_CHUNK_BYTES))
        size_bytes = padded_bytes(sizes, chunks)
        is_small = chunks == 1 and workers > 1
        layers = [] if is_small else self._layers_to_factor()
        begins, arena_bytes = aligned_offsets(
            [*([size_bytes] * (1 + workers)), *(workers * memory_bytes(layer) for layer in layers)]
        )
        arena = SharedSegment(levels.intra_node, arena_bytes)
        first = weights[0]
        blocks = [
            arena.tensor(begin, size_bytes // first.element_size(), first.dtype)
            for begin in begins[: 1 + workers]
        ]
        values, *deposits = (FlatBuffer(weights, shards=chunks, memory=block) for block in blocks)
        # All ranks of a host write the same values; a barrier follows before any update.
        values.hold_weights()
        pieces: list[ParameterShard] = []
        if place < chunks:
            pieces = pieces_of_chunk(weights, values, deposits[place], place, chunks)
        numbers = {id(weight): number for number, weight in enumerate(weights)}
        factored = {
            numbers[id(layer.weight)]: LinearGradientFactors(layer, arena, begin, place, workers)
            for layer, begin in zip(layers, begins[1 + workers :], strict=True)
        }
        self._deposits: PublishedGradients | InPlaceGradients
        if is_small:
            self._deposits = InPlaceGradients(weights, deposits, place)
        else:
            self._deposits = PublishedGradients(
                replica,
                weights,
                pieces,
                deposits,
                place,
                factored,
                sums_lie_together=levels.inter_node.world_size > 1,
            )
        self._own = ShardedOptimizer(replica, weights, pieces, levels.intra_node)
        self._chunk = chunk(deposits[place].tensor, chunks, place) if pieces else torch.empty(0)
        """Where the sums of this worker's pieces lie together, to be exchanged across hosts."""
        self._must_wait_for_update = chunks > 1 or place > 0
        """Who alone updates everything can go on: nobody else changes what it reads, and a barrier
        of shared memory counts as soon as it is begun."""

    def _layers_to_factor(self) -> list[nn.Linear]:
        """None where a compiler has taken the forward pass, or where one worker is alone."""
        replica = self.replica
        if replica.forward is not replica.model or self._levels.intra_node.world_size == 1:
            return []
        return layers_to_factor(replica.model, self._trained)

    def step(self) -> None:
        replica, host = self.replica, self._levels.intra_node
        with replica.exposed_communication():
            self._sum_chunk()
        self._own.update()
        self._deposits.drop_sums()
        with replica.exposed_communication():
            updated = host.barrier()
            if self._must_wait_for_update:
                updated.wait()
        replica.clock.enter("update")
        self._deposits.clear()

    def _sum_chunk(self) -> None:
        levels, traffic = self._levels, self.replica.communicator.traffic
        given_bytes = self._deposits.publish()
        giving = traffic.begin("gradients", bytes_sent=given_bytes, messages=bool(given_bytes))
        given = levels.intra_node.barrier()
        if self._chunk.numel():
            given.wait()
            read_bytes = self._deposits.reduce()
            traffic.end(traffic.begin("gradients", bytes_received=read_bytes))
        traffic.end(giving)
        levels.inter_node.all_reduce(self._chunk, "gradients").wait()

    def finish(self) -> None:
        """Every worker leaves with weights of its own."""
        for weight in self._trained:
            weight.data = weight.data.clone(memory_format=torch.preserve_format)
        self._deposits.release()
        # Not before all have copied: what one does with its model then is its own affair.
        self._levels.intra_node.barrier().wait()
        self._levels.close()
        # A last checkpoint may follow.
        self._own.gather_over(self.replica.communicator)

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """On one host: two meetings, and each worker reads one chunk of all other buffers."""
        peers = shape.workers - 1
        size_bytes = padded_bytes(shape.tensor_bytes, shape.workers)
        moved = peers * size_bytes / shape.workers
        messages = 2 if peers else 0
        return Cost(network.seconds(messages, moved, moved), bytes_sent=moved, messages=peers)
