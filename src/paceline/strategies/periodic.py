"""Replicas that train on their own for a while and then draw near to one another.

Between exchanges a worker follows the gradient of its own samples. Losses come weighted by the
worker's share of the global batch; multiplied by the number of workers, an equal share gets the
mean loss of its own samples, and an unequal one counts by its samples, so that the mean of all
workers' updates is an update on the whole batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.comm import ALGORITHMS
from paceline.comm.cost import Cost
from paceline.strategies.checkpoint_state import CheckpointState
from paceline.strategies.flat_buffer import FlatWeights
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy


class PeriodicSync(Strategy):
    replicas_equal = False

    def __init__(self, algorithm: str) -> None:
        self.algorithm = ALGORITHMS.load(algorithm)()
        self._steps = 0
        self._diverged = False
        """Whether replicas may hold different weights now."""

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        self._weights = FlatWeights(replica.trainable)
        self.checkpoint = PeriodicCheckpointState(self)

    def backward(self, loss: Tensor) -> None:
        self.replica.backward(loss * self.replica.communicator.world_size)

    @abstractmethod
    def global_weights(self) -> Tensor:
        """What the replicas agree on, in the layout of the flat weights. Collective."""

    def reset_global_weights(self) -> None:
        """Restart from this rank's weights, which are equal on all ranks."""

    @contextmanager
    def eval_weights(self) -> Iterator[None]:
        if not self._diverged:
            yield
            return
        own = self._weights.tensor.clone()
        self._weights.tensor.copy_(self.global_weights())
        try:
            yield
        finally:
            self._weights.tensor.copy_(own)

    def _sum(self, tensor: Tensor, kind: str = "parameters") -> Tensor:
        """In place, over all workers. Collective."""
        if self.replica.communicator.world_size > 1:
            self.algorithm.all_reduce(self.replica.communicator, tensor, kind)
        return tensor

    def state_dict(self) -> dict[str, Any]:
        """While replicas differ, all that is this worker's own: a checkpoint has rank 0's."""
        state: dict[str, Any] = {"steps": self._steps}
        if self._diverged:
            state["model"] = self.replica.model.state_dict()
            state["optimizer"] = self.replica.optimizer.state_dict()
            state["scaler"] = self.replica.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        self._diverged = "model" in state
        if self._diverged:
            self.replica.model.load_state_dict(state["model"])
            self.replica.optimizer.load_state_dict(state["optimizer"])
            self.replica.scaler.load_state_dict(state["scaler"])


class PeriodicCheckpointState(CheckpointState):
    """Saves the global weights, which differ from each rank's own between outer steps."""

    def __init__(self, strategy: PeriodicSync) -> None:
        super().__init__(strategy.replica)
        self._strategy = strategy

    def model_state_dict(self) -> dict[str, Any]:
        with self._strategy.eval_weights():
            return {name: value.clone() for name, value in super().model_state_dict().items()}

    def load_model_state_dict(self, state: dict[str, Any]) -> None:
        super().load_model_state_dict(state)
        self._strategy.reset_global_weights()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Momentum, moments and step counts, in an order that is the same on every worker."""
    state = optimizer.state_dict()["state"]
    return [
        value
        for _, values in sorted(state.items())
        for _, value in sorted(values.items())
        if isinstance(value, Tensor) and value.is_floating_point()
    ]


def spread(exchange: Cost, steps: int) -> Cost:
    """What one step bears of an exchange after so many."""
    return Cost(
        seconds=exchange.seconds / steps,
        bytes_sent=exchange.bytes_sent / steps,
        messages=-(-exchange.messages // steps),
    )
