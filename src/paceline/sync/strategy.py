"""The contract of a strategy, small enough to write your own in a page.

For each update the loop calls `backward` once for every part of the worker's batch, then `step`.
Losses are weighted so that the *sum* of all workers' gradients is the gradient of the mean loss
over the whole global batch, however unequal the workers' shares are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from paceline.comm.cost import Cost, Network
from paceline.sync.replica import Replica


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cost of a strategy depends on besides the network."""

    workers: int
    tensor_bytes: tuple[int, ...]
    """Of each trainable tensor, in the model's order."""

    @property
    def gradient_bytes(self) -> int:
        return sum(self.tensor_bytes)


class Strategy:
    """How replicas are kept in step; this base trains alone.

    `options` are the user's `-o key=value`, already converted to the types of the constructor's
    keyword arguments.
    """

    lockstep: ClassVar[bool] = True
    """Whether all workers do the same iteration at a time, so that they can meet between two."""
    equal: ClassVar[bool] = True
    """Whether all workers hold the same weights after every step."""
    least_workers: ClassVar[int] = 1
    most_workers: ClassVar[int | None] = None
    """The largest number of workers it can keep in step, where there is a limit."""

    holds_all_weights: bool = True
    """Whether `replica.model` has all of its weights here, now; some only have a part of them."""

    replica: Replica

    def attach(self, replica: Replica) -> None:
        """Called once, before training: bring all replicas to the same state, install hooks."""
        self.replica = replica

    def backward(self, loss: Tensor) -> None:
        """The backward pass; it may already communicate when `replica.last_part` is set."""
        self.replica.backward(loss)

    def step(self) -> None:
        """Synchronise, and update the weights."""
        self.replica.fill_missing_gradients()
        self.replica.update()

    def finish(self) -> None:
        """Called once, after training: afterwards every replica holds all of the final weights."""

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds what the workers agree on, to be evaluated. Collective.

        Where replicas differ between their exchanges that is their mean, or the centre's weights.
        """
        yield

    def agree_to_stop(self, stop: bool) -> bool:
        """Out of lockstep: say whether this worker wants to stop; whether any of them does."""
        return stop

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """What keeping in step should cost an update, beyond computing; planning uses it."""
        raise NotImplementedError

    def model_state(self) -> dict[str, Any]:
        """Weights and buffers of the whole model, as it has them alone. Collective."""
        return self.replica.model.state_dict()

    def load_model_state(self, state: dict[str, Any]) -> None:
        """Take what `model_state` gave, under whatever strategy. Every worker is given the same."""
        self.replica.model.load_state_dict(state)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimiser's state as one that trains alone has it. Collective; rank 0's counts."""
        return self.replica.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Take the state of an optimiser that trained alone. Every worker is given the same."""
        self.replica.optimizer.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """What else this worker must remember: tensors, numbers, strings; each has its own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank."""
