"""The contract of a strategy, small enough to write your own in a page.

For each update the loop calls `backward` once for every part of the worker's batch, then `step`.
Losses are weighted so that the *sum* of all workers' gradients is the gradient of the mean loss
over the whole global batch, however unequal the workers' shares are.

One worker: the yardstick that every other strategy is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.communicator import Communicator
from paceline.comm.cost import Cost, Network
from paceline.config import RunConfig
from paceline.strategies.replica import Replica


def needs_torch(config: RunConfig) -> list[str]:
    """The refusal of strategies that use torch.distributed's own process group."""
    if config.communicator == "torch":
        return []
    return [
        f"--communicator {config.communicator}: strategy {config.strategy} can only use torch:"
        " take that, or another --strategy"
    ]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cost of a strategy depends on besides the network."""

    workers: int
    tensor_bytes: tuple[int, ...]
    """Of each trainable tensor, in the model's order."""

    @property
    def gradient_bytes(self) -> int:
        return sum(self.tensor_bytes)


MakeOptimizer = Callable[[nn.Parameter], Optimizer]
"""The optimizer of a run's config, for a tensor."""

Call = Literal["train", "meet", "stop", "end"]
CALLS: tuple[Call, ...] = get_args(Call)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker does next: compute its part of a global batch.

    First it may have to meet all others (`meet`), which is the time for a checkpoint. Or nothing is
    left to compute, because a worker was asked to `stop` or since it is the `end`. All workers get
    one of these three calls together, so that they enter the same collectives.
    """

    iteration: int
    part: int
    """Which of the parts of the batch, of which there are as many as workers."""
    call: Call = "train"


@dataclass(frozen=True, slots=True)
class AssignmentRequest:
    """What a worker out of lockstep says when it claims its next turn."""

    first: int
    """The iteration that this run began or was resumed with."""
    total: int
    """Iterations of the whole run."""
    checkpoint_every: int
    """Iterations from one meeting of all workers to the next; 0: never."""
    stop: bool
    """Whether this worker was asked to stop."""
    finish: bool = False
    """Whether this worker has reached the target accuracy, so that the run is complete."""


class Strategy:
    """How replicas are kept in step; this base trains alone.

    `options` are the user's `-o key=value`, already converted to the types of the constructor's
    keyword arguments.
    """

    synchronous: bool = True
    """Whether all workers do the same iteration at a time, so that they can meet between two."""
    replicas_equal: bool = True
    """Whether all workers hold the same weights after every step."""
    max_world_size: ClassVar[int | None] = None
    """The largest number of workers it can keep in step, where there is a limit."""

    holds_all_weights: bool = True
    """Whether `replica.model` has all of its weights here, now; some only have a part of them."""

    replica: Replica

    def check(self, config: RunConfig) -> list[str]:
        """Which of a run's settings it cannot serve: a line for each that says what to change.

        Asked before any process starts.
        """
        return []

    def setup(self, replica: Replica) -> None:
        """Called once, before training: bring all replicas to the same state, install hooks."""
        self.replica = replica

    def backward(self, loss: Tensor) -> None:
        """The backward pass; it may already communicate when `replica.last_part` is set."""
        self.replica.backward(loss)

    def step(self) -> None:
        """Synchronize, and update the weights."""
        self.replica.fill_missing_gradients()
        self.replica.update()

    def settle_accounts(self) -> None:
        """Called before times are read: account for every step that has ended.

        For strategies that learn only later how long an exchange took. Not collective.
        """

    def finish(self) -> None:
        """Called once, after training: afterwards every replica holds all of the final weights."""

    @contextmanager
    def eval_weights(self) -> Iterator[None]:
        """Inside, the model holds what the workers agree on, to be evaluated. Collective.

        Where replicas differ between their exchanges that is their mean, or the centre's weights.
        """
        yield

    def next_assignment(self, terms: AssignmentRequest) -> Assignment:
        """Out of lockstep: what this worker does next; the model then has the weights for it."""
        raise NotImplementedError

    def server_nodes(self, nnodes: int) -> list[int]:
        """On which node each of the server processes is to run that this strategy needs."""
        return []

    def serve(
        self, number: int, workers: Sequence[Communicator], make_optimizer: MakeOptimizer
    ) -> None:
        """What server `number` does until its workers have left.

        `workers` are its connections to them, by rank: pairs in which the server is rank 0.
        """
        raise NotImplementedError

    def notes(self) -> dict[str, list[int]]:
        """What to write beside the iterations since the last time: one number for each of them."""
        return {}

    def account(self) -> dict[str, Any]:
        """What it has to tell in the worker's part of the result."""
        return {}

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
        """The optimizer's state as one that trains alone has it. Collective; rank 0's counts."""
        return self.replica.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Take the state of an optimizer that trained alone. Every worker is given the same."""
        self.replica.optimizer.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """What else this worker must remember: tensors, numbers, strings; each has its own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank."""


class Single(Strategy):
    max_world_size: ClassVar[int | None] = 1

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        return Cost(seconds=0.0, bytes_sent=0, messages=0)
