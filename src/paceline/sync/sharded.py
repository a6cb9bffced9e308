"""Optimiser state split over the workers (ZeRO, stages 1 and 2).

Every worker has all weights, and updates one chunk of them; so it needs the optimiser's state of
that chunk alone, a part of 1 / workers. All weights lie in one tensor, all gradients in another.
After the backward pass a reduce-scatter leaves on each worker the sum of its own chunk of the
gradients, the worker updates that chunk of the weights, and an all-gather hands the chunks around.
That is an all-reduce with the update in the middle: it moves the same bytes as averaging gradients
does, and computes the same weights.
"""

from __future__ import annotations

from typing import Any

from paceline.comm.algorithms.ring import Ring
from paceline.comm.cost import Cost, Network
from paceline.sync.aligned import AlignedMemory, padded_bytes
from paceline.sync.own_part import OwnPart, check_splittable, optimizer_weights, pieces_of_chunk
from paceline.sync.replica import Replica
from paceline.sync.state_exchange import broadcast_model
from paceline.sync.strategy import ModelShape, Strategy


class Sharded(Strategy):
    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        check_splittable(replica.optimizer, "sharded")
        weights = optimizer_weights(replica.optimizer)
        broadcast_model(replica.model, replica.communicator)
        rank, workers = replica.communicator.rank, replica.communicator.world_size
        self._weights = AlignedMemory(weights, workers)
        self._gradients = AlignedMemory(weights, workers)
        for number, weight in enumerate(weights):
            weight.data = self._weights.views[number].copy_(weight.data)
            weight.grad = self._gradients.views[number] if weight.requires_grad else None
        replica.flat_gradients = self._gradients.tensor
        pieces = pieces_of_chunk(weights, self._weights, self._gradients, rank, workers)
        self.own = OwnPart(replica, weights, pieces, replica.communicator)

    def step(self) -> None:
        replica, communicator = self.replica, self.replica.communicator
        with replica.exchanging():
            communicator.reduce_scatter(self._gradients.tensor, "gradients").wait()
        self.own.update()
        with replica.exchanging():
            communicator.all_gather(self._weights.tensor, "parameters").wait()
        replica.clock.enter("update")
        replica.clear_gradients()

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """Of a ring's two halves; clipping and fp16 add an all-reduce of two numbers."""
        size_bytes = padded_bytes(shape.tensor_bytes, shape.workers)
        return Ring().cost(shape.workers, size_bytes, network)

    def optimizer_state(self) -> dict[str, Any]:
        return self.own.state()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self.own.load_state(state)
