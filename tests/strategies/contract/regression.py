"""A small regression with rounding, optionally saved and restored in between."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.objects import broadcast_json
from paceline.data.sampling import shard_bounds
from paceline.strategies import create_strategy
from paceline.strategies.strategy import Strategy
from paceline.training import run_state
from paceline.training.run_state import Progress
from tests.strategies.contract.harness import (
    Connections,
    Task,
    build_replica,
    options_of,
    weights_of,
)

SAMPLES = 21
"""A multiple of three only, so that shards are unequal for most world sizes."""


@dataclass(frozen=True)
class RegressionTask(Task):
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.01
    steps: int = 8
    save_after: int | None = None
    """After this step, the state is saved and training continues with new objects."""


@dataclass(frozen=True)
class Fitted:
    """Final state of one worker."""

    losses: list[float]
    """Over all samples, before the first step and after each."""
    after_each_step: list[Tensor]


class Crosswise(nn.Module):
    """Gradients do not become ready in the reverse order of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(10, 3), nn.Linear(6, 24)
        self.middle = nn.Linear(24, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.middle(self.first(inputs).tanh()).tanh())
        return outputs


def fit(connections: Connections, name: str, task: RegressionTask) -> Fitted:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy = begin(Crosswise(), connections, name, task, seed=connections.communicator.rank)
        losses, weights = [_loss(strategy)], []
        for step in range(task.steps):
            if step == task.save_after:
                saved = saved_state(strategy)
                strategy.finish()
                strategy = begin(Crosswise(), connections, name, task, seed=99)
                run_state.restore(saved, strategy.replica, strategy)
            _step(strategy, step)
            losses.append(_loss(strategy))
            weights.append(weights_of(strategy))
        strategy.finish()
    return Fitted(losses, weights)


def begin(model: nn.Module, connections: Connections, name: str, task: Task, seed: int) -> Strategy:
    """Set up a strategy with weights drawn from the seed."""
    # Not the default generator: workers may be threads of one process.
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    strategy = create_strategy(name, options_of(name, task))
    strategy.setup(build_replica(model, connections, task))
    return strategy


def _samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return inputs, (inputs @ torch.randn(6, 3, generator=generator)).tanh()


def _step(strategy: Strategy, step: int) -> None:
    replica = strategy.replica
    inputs, targets = _samples()
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))
    world_size = replica.communicator.world_size
    part = order[shard_bounds(SAMPLES, [1.0] * world_size, replica.communicator.rank)]
    replica.batch_fraction = len(part) / SAMPLES
    loss = F.mse_loss(replica.forward(inputs[part]), targets[part])
    strategy.backward(loss * replica.batch_fraction)
    strategy.step()


def _loss(strategy: Strategy) -> float:
    inputs, targets = _samples()
    with torch.no_grad(), strategy.eval_weights():
        return float(F.mse_loss(strategy.replica.model(inputs), targets))


def saved_state(strategy: Strategy) -> dict[str, object]:
    """Return the state of a checkpoint on every rank, as if read from a file."""
    communicator = strategy.replica.communicator
    gathered = run_state.gather(strategy.replica, strategy, Progress(), {})
    buffer = io.BytesIO()
    torch.save(gathered, buffer)
    size = broadcast_json(communicator, buffer.getbuffer().nbytes)
    packed = torch.zeros(size, dtype=torch.uint8)
    if communicator.rank == 0:
        packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    communicator.broadcast(packed, 0, "control").wait()
    loaded: dict[str, object] = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    return loaded
