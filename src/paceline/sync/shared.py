"""One copy of the weights per host, in memory that its workers share.

Every worker's model reads the same weights, and every worker adds its gradients up in a buffer that
the others can read. In a step, worker i sums chunk i of all buffers and applies the optimiser to
chunk i of the weights; its state of that chunk is the only one on the host. Nothing is copied in or
out, the update is done once instead of once a worker, and weights and state take one worker's
memory instead of everybody's. Two meetings keep this right: gradients are summed when all are
there, and weights are read when all chunks are updated.

Across hosts, worker i exchanges the sum of chunk i with the workers i of the other hosts, so that
all links carry equal parts; then every host updates its own copy.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.comm.algorithms.chunks import chunk
from paceline.comm.arena import Arena
from paceline.comm.cost import Cost, Network
from paceline.comm.levels import Levels, split
from paceline.errors import ConfigError
from paceline.sync.aligned import AlignedMemory, padded_bytes
from paceline.sync.own_part import OwnPart, check_splittable, optimizer_weights, pieces_of_chunk
from paceline.sync.replica import Replica
from paceline.sync.state_exchange import broadcast_model
from paceline.sync.strategy import ModelShape, Strategy


class Shared(Strategy):
    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        check_splittable(replica.optimizer, "shared")
        self._trained = optimizer_weights(replica.optimizer)
        if self._trained[0].device.type != "cpu":
            raise ConfigError(
                ["--strategy shared: weights are shared in main memory: use --device cpu"]
            )
        broadcast_model(replica.model, replica.communicator)
        self._levels = split(replica.communicator, replica.node)
        self._share_memory(self._levels)

    def _share_memory(self, levels: Levels) -> None:
        replica, weights = self.replica, self._trained
        place, workers = levels.host.rank, levels.host.world_size
        size_bytes = padded_bytes([weight.nbytes for weight in weights], workers)
        arena = Arena(levels.host, (1 + workers) * size_bytes)
        element = weights[0]
        blocks = [
            arena.tensor(number * size_bytes, size_bytes // element.element_size(), element.dtype)
            for number in range(1 + workers)
        ]
        values, *gradients = (AlignedMemory(weights, workers, block) for block in blocks)
        for number, weight in enumerate(weights):
            # All workers of a host write the same, and none updates before all have come.
            weight.data = values.views[number].copy_(weight.data)
            weight.grad = gradients[place].views[number] if weight.requires_grad else None
        replica.flat_gradients = gradients[place].tensor
        self._sum = chunk(gradients[place].tensor, workers, place)
        """In this worker's own buffer, whose chunk no other reads."""
        self._addends = [
            chunk(gradient.tensor, workers, place)
            for number, gradient in enumerate(gradients)
            if number != place
        ]
        pieces = pieces_of_chunk(weights, values, gradients[place], place, workers)
        self._own = OwnPart(replica, weights, pieces, levels.host)

    def step(self) -> None:
        replica, levels = self.replica, self._levels
        with replica.exchanging():
            levels.host.barrier().wait()
            self._sum_own_chunk()
            levels.across.all_reduce(self._sum, "gradients").wait()
        self._own.update()
        with replica.exchanging():
            levels.host.barrier().wait()
        replica.clock.enter("update")
        replica.clear_gradients()

    def _sum_own_chunk(self) -> None:
        moved = len(self._addends) * self._sum.nbytes
        traffic = self.replica.communicator.traffic
        traffic.begin(
            "gradients", bytes_sent=moved, bytes_received=moved, messages=len(self._addends)
        )
        for addend in self._addends:
            self._sum.add_(addend)
        traffic.end("gradients")

    def finish(self) -> None:
        """Every worker leaves with weights of its own."""
        for weight in self._trained:
            weight.data = weight.data.clone(memory_format=torch.preserve_format)
            weight.grad = None
        self.replica.flat_gradients = None
        # Not before all have copied: what one does with its model then is its own affair.
        self._levels.host.barrier().wait()
        self._levels.close()

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """On one host: two meetings, and each worker reads one chunk of all other buffers."""
        peers = shape.workers - 1
        size_bytes = padded_bytes(shape.tensor_bytes, shape.workers)
        moved = peers * size_bytes / shape.workers
        messages = 2 if peers else 0
        return Cost(network.seconds(messages, moved, moved), bytes_sent=moved, messages=peers)

    def optimizer_state(self) -> dict[str, Any]:
        return self._own.state()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self._own.load_state(state)
