"""The strategy contract: how ranks keep their replicas of a model synchronized.

For each step the training loop calls `backward` once per microbatch, then `step`. Losses are
weighted so that the *sum* of all ranks' gradients is the gradient of the mean loss over the global
batch, even if ranks compute unequal fractions of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.connection import Connection
from paceline.comm.cost import Cost, Network
from paceline.config import RunConfig
from paceline.strategies.checkpoint_state import CheckpointState
from paceline.strategies.optimizer_step import lacks_momentum
from paceline.strategies.replica import Replica, broadcast_model


class StepMeter:
    """Measurements that a strategy adds to the records of a run; all methods are optional."""

    def take(self) -> dict[str, list[int]]:
        """Return the values since the last call, for the events file: one per key and step."""
        return {}

    def summary(self) -> dict[str, Any]:
        """Return entries for this rank's part of result.json."""
        return {}

    def settle(self) -> None:
        """Account for every completed step, before phase times are read. Not collective.

        For strategies that measure the duration of a transfer only after its step.
        """


class Strategy:
    """Base class of synchronous strategies; on its own it trains a single process.

    The keyword arguments of a subclass's constructor are its `-o key=value` options, converted to
    the annotated types.
    """

    synchronous: bool = True
    """Whether all ranks compute the same iteration at the same time."""
    replicas_equal: bool = True
    """Whether all ranks hold the same weights after every step."""
    reports_own_gradients: ClassVar[bool] = False
    """Whether it reports this rank's gradients to `replica.noise`, because they are exchanged or
    freed before `step` or are not in the weights' `grad`."""
    max_world_size: ClassVar[int | None] = None
    """The largest supported number of workers; None means no limit."""
    warmup_steps: int = 3
    """Eager steps before a CUDA graph of the step is captured."""

    replica: Replica
    """This rank's model and optimizer; set by `setup`."""
    meter: StepMeter | None = None
    """Additional measurements of each step, if any."""

    @cached_property
    def checkpoint(self) -> CheckpointState:
        """Saves and loads model and optimizer state; subclasses may replace it in `setup`."""
        return CheckpointState(self.replica)

    def check(self, config: RunConfig) -> list[str]:
        """Return one line per unsupported setting that says what to change.

        Called before any process starts.
        """
        return []

    def setup(self, replica: Replica) -> None:
        """Prepare for training: copy rank 0's model to all ranks. Called once. Collective."""
        self.replica = replica
        broadcast_model(replica.model, replica.communicator)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass.

        Communication may start in the last microbatch (`replica.is_last_microbatch`).
        """
        self.replica.backward(loss)

    def step(self) -> None:
        """Synchronize gradients and update the weights."""
        self.replica.fill_missing_gradients()
        self.replica.update()

    def capture_obstacle(self) -> str | None:
        """Return why a training step cannot be captured in a CUDA graph; None if it can.

        Called after `setup`. A captured step repeats the GPU work of `backward` and `step`, but not
        their Python code: values that change from step to step must be in tensors, and nothing may
        wait for the GPU.
        """
        return "the strategy does not support it"

    def noise_obstacle(self) -> str | None:
        """Return why the gradient noise scale cannot be measured; None if it can.

        Called after `setup`.
        """
        return (
            None if self.replicas_equal else "workers do not average their gradients in each step"
        )

    def is_warm(self) -> bool:
        """Return whether the next steps repeat the GPU work of the last one.

        Asked after `warmup_steps`; until it is true, steps run eagerly.
        """
        return not (self.replica.scaler.is_enabled() and lacks_momentum(self.replica.optimizer))

    def capture_key(self) -> Hashable:
        """Return a key that differs between steps with different GPU work; each has a graph."""
        return None

    def discard_step(self) -> None:
        """Forget what `backward` and `step` began in a capture that failed: none of it ran."""
        self.replica.discard_step()

    def replay_observers(self) -> list[Any]:
        """Return what has to know about captures and replays (training/gpu/cuda_graph.py)."""
        return self.replica.communicator.replay_observers()

    def synchronize(self) -> None:
        """Wait until a GPU has completed the communication of all steps; raise its error."""
        self.replica.communicator.synchronize()

    def finish(self) -> None:
        """End training: load the final weights on every rank. Called once. Collective."""

    @contextmanager
    def eval_weights(self) -> Iterator[None]:
        """Context manager inside which the model holds the weights to evaluate. Collective.

        If replicas differ between synchronizations, these are their mean or the center weights.
        """
        yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank that `checkpoint` does not cover.

        Values are tensors, numbers, strings, and lists and dicts of them.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict` on this rank."""


class SingleProcess(Strategy):
    """Trains one process; the baseline for all other strategies."""

    max_world_size: ClassVar[int | None] = 1

    def capture_obstacle(self) -> str | None:
        return None

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        return Cost(seconds=0.0, bytes_sent=0, messages=0)


Action = Literal["train", "checkpoint", "stop", "end"]
ACTIONS: tuple[Action, ...] = get_args(Action)


@dataclass(frozen=True, slots=True)
class Assignment:
    """The next task of a rank: one part of a global batch to compute, and an action.

    The actions `checkpoint`, `stop` and `end` are collective: all ranks get the same one. With
    `checkpoint`, ranks write a checkpoint before they compute. With `stop` and `end`, they compute
    nothing.
    """

    iteration: int
    part: int
    """Index of the part of the batch; a batch has as many parts as there are workers."""
    action: Action = "train"
    ahead: int = 0
    """Iterations between this batch and the batch of the slowest worker."""
    waited_seconds: float = 0.0
    """Time that the request waited on the server."""


@dataclass(frozen=True, slots=True)
class AssignmentRequest:
    """A rank's request for its next assignment."""

    first: int
    """The iteration that this run started or resumed from."""
    total: int
    """Number of iterations of the whole run."""
    checkpoint_every: int
    """Iterations between checkpoints; 0 means never."""
    stop: bool
    """Whether this rank was asked to stop."""
    finish: bool = False
    """Whether this rank has reached the target accuracy, which completes the run."""


MakeOptimizer = Callable[[nn.Parameter], Optimizer]
"""Builds the configured optimizer for one tensor."""


class ServerStrategy(Strategy, ABC):
    """Base class of strategies with server processes; subclasses may set `synchronous = False`."""

    @abstractmethod
    def server_nodes(self, nnodes: int) -> list[int]:
        """Return the node rank of each server process."""

    @abstractmethod
    def serve(
        self, index: int, workers: Sequence[Connection], make_optimizer: MakeOptimizer
    ) -> None:
        """Run server `index` until all workers have disconnected.

        `workers` holds one connection per worker, by rank.
        """

    @abstractmethod
    def next_assignment(self, request: AssignmentRequest) -> Assignment:
        """Return this rank's next assignment, and load the current weights into the model.

        Called only if `synchronous` is false.
        """


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a job that the cost of a strategy depends on."""

    workers: int
    tensor_bytes: tuple[int, ...]
    """Size of each trainable tensor, in the model's order."""

    @property
    def gradient_bytes(self) -> int:
        return sum(self.tensor_bytes)


class CostModel(Protocol):
    """Implemented by strategies whose communication cost can be predicted."""

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """Return the predicted communication cost of one step."""


def check_elementwise(config: RunConfig) -> list[str]:
    """Return an error line if the optimizer cannot update shards of a weight separately."""
    if config.optimizer != "muon":
        return []
    # Muon needs whole matrices.
    return [f"--optimizer muon: not supported by strategy {config.strategy}; use adamw"]


def check_uses_torch(config: RunConfig) -> list[str]:
    """Return an error line unless the run uses torch.distributed's process group."""
    if config.communicator == "torch":
        return []
    return [
        f"--communicator {config.communicator}: strategy {config.strategy} requires torch;"
        " use --communicator torch or another --strategy"
    ]
