"""Base class of strategies that synchronize periodically: local steps, then an outer step.

Between outer steps, each rank trains on its own samples. Losses arrive weighted by the rank's
fraction of the global batch and are multiplied by the world size here. If all fractions are equal,
the result is the mean loss of the rank's samples. If not, ranks with more samples have a larger
weight. In both cases, the mean of all ranks' updates is an update on the global batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.comm.algorithms import ALGORITHMS
from paceline.comm.cost import Cost
from paceline.strategies.checkpoint_state import CheckpointState
from paceline.strategies.flat_buffer import FlatBuffer
from paceline.strategies.gradient_averaging import library_obstacle
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy


class PeriodicSync(Strategy):
    """Runs `outer_step` every `every` local steps.

    Subclasses implement `outer_step` and `global_weights`.
    """

    replicas_equal = False
    outer_step_equalizes: bool = False
    """Whether all replicas are equal after an outer step."""

    def __init__(self, algorithm: str, every: int, warmup: int = 0) -> None:
        """The first `warmup` steps are synchronous: they sum gradients with `reduce_gradients`."""
        self.algorithm = ALGORITHMS.load(algorithm)()
        self._every, self._warmup = every, warmup
        self._steps = 0
        self._diverged = False
        """Whether replicas may currently hold different weights."""

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        self._weights = FlatBuffer(replica.trainable)
        self._weights.hold_weights()
        self.checkpoint = PeriodicCheckpointState(self)

    def backward(self, loss: Tensor) -> None:
        weight = 1 if self._is_warmup else self.replica.communicator.world_size
        self.replica.backward(loss if weight == 1 else loss * weight)

    def step(self) -> None:
        if self._is_warmup:
            with self.replica.exposed_communication():
                self.reduce_gradients()
        super().step()
        if self._has_outer_step:
            with self.replica.exposed_communication():
                self.outer_step()
        self._count_step()

    @property
    def _is_warmup(self) -> bool:
        """Whether the current step is a warmup step."""
        return self._steps < self._warmup

    @property
    def _has_outer_step(self) -> bool:
        """Whether the current step ends with an outer step."""
        return not self._is_warmup and (self._steps + 1 - self._warmup) % self._every == 0

    def _count_step(self) -> None:
        if not self._is_warmup:
            self._diverged = not (self._has_outer_step and self.outer_step_equalizes)
        self._steps += 1

    def capture_obstacle(self) -> str | None:
        communicator = self.replica.communicator
        if communicator.world_size > 1 and (obstacle := library_obstacle(self.algorithm)):
            return obstacle
        return communicator.capture_obstacle()

    def capture_key(self) -> Hashable:
        return self._is_warmup, self._has_outer_step

    def replay_observers(self) -> list[Any]:
        return [*super().replay_observers(), _StepCounter(self)]

    @abstractmethod
    def outer_step(self) -> None:
        """Synchronize the replicas after `every` local steps. Collective."""

    @abstractmethod
    def global_weights(self) -> Tensor:
        """Return the weights to evaluate, in the layout of the flat buffer. Collective."""

    def reduce_gradients(self) -> None:
        """Sum gradients over all ranks in a warmup step. Collective."""
        raise NotImplementedError

    def reset_global_weights(self) -> None:
        """Set the global weights to this rank's weights, which are equal on all ranks."""

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

    def state_dict(self) -> dict[str, Any]:
        # If replicas differ, `checkpoint` does not contain this rank's model and optimizer.
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

    def _sum(self, tensor: Tensor, kind: str = "parameters") -> Tensor:
        """Sum in place over all ranks. Collective."""
        if self.replica.communicator.world_size > 1:
            self.algorithm.all_reduce(self.replica.communicator, tensor, kind)
        return tensor


class _StepCounter:
    """Counts the replays of a captured step."""

    def __init__(self, strategy: PeriodicSync) -> None:
        self._strategy = strategy

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Nothing runs during a capture, so afterwards the strategy is in the same state."""
        strategy = self._strategy
        before = strategy._steps, strategy._diverged
        try:
            yield
        finally:
            strategy._steps, strategy._diverged = before

    def before_replay(self, _: None) -> None:
        return

    def replayed(self, _: None) -> None:
        self._strategy._count_step()


class PeriodicCheckpointState(CheckpointState):
    """Saves the global weights, which differ from each rank's weights between outer steps."""

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
    """Return momentum, moments and step counts, in the same order on every rank."""
    state = optimizer.state_dict()["state"]
    return [
        value
        for _, values in sorted(state.items())
        for _, value in sorted(values.items())
        if isinstance(value, Tensor) and value.is_floating_point()
    ]


def amortize(outer_step: Cost, every: int) -> Cost:
    """Return the cost per local step if an outer step runs every `every` steps."""
    return Cost(
        seconds=outer_step.seconds / every,
        bytes_sent=outer_step.bytes_sent / every,
        messages=-(-outer_step.messages // every),
    )
