"""A small training loop around one strategy, which every worker runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.connection import Connection
from paceline.config import RunConfig
from paceline.data.sampling import shard_bounds
from paceline.measure.phase_clock import PhaseClock
from paceline.strategies import STRATEGIES, create_strategy
from paceline.strategies.ddp import Ddp
from paceline.strategies.gradient_averaging import GradientAveraging
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import ServerStrategy, Strategy
from tests.strategies.contract.exact import ExactModel, exact_batch
from tests.support.server_threads import run_with_servers
from tests.support.worker_pool import WorkerPool

SMALL_BUCKETS = {
    "overlap": {"bucket_mib": "0.001", "first_bucket_mib": "0.0001"},
    "ddp": {"bucket_mib": "0.001"},
}
"""The exact model fills several buckets of this size, and its largest weight more than one."""


@dataclass(frozen=True)
class Task:
    """A training task; batch sizes must be powers of two for the sums to be exact."""

    batches: tuple[int, ...] = (16, 16, 8, 2)
    """Samples in each global batch; the last leaves some workers without a sample."""
    shares: tuple[float, ...] = ()
    accumulate: int = 1
    clip_norm: float | None = None
    loss_scale: float | None = None
    unused: bool = False
    lr: float = 0.5
    momentum: float = 0.5
    weight_decay: float = 0.5
    options: tuple[tuple[str, str], ...] = ()
    """Options of the strategy."""

    def make_optimizer(self, weights: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(weights, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Connections:
    """Connections of a worker."""

    communicator: Communicator
    servers: Sequence[Connection] = ()
    node: int = 0


@dataclass(frozen=True)
class Trained:
    """Final state of one worker."""

    after_each_step: list[Tensor]
    """All weights, concatenated."""
    final: Tensor
    traffic: dict[str, dict[str, int | float]]


def options_of(name: str, task: Task) -> dict[str, str]:
    options = {**SMALL_BUCKETS.get(name, {}), **dict(task.options)}
    if task.unused and name == "ddp":
        options["find_unused"] = "true"
    return options


def build_replica(
    model: nn.Module, connections: Connections, task: Task, optimizer: Optimizer | None = None
) -> Replica:
    """Build a replica with the optimizer of the task, or another one."""
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    if task.loss_scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=task.loss_scale)
    return Replica(
        model=model,
        optimizer=optimizer or task.make_optimizer(trainable),
        clock=PhaseClock(),
        forward=model,
        scaler=scaler,
        communicator=connections.communicator,
        node=connections.node,
        clip_norm=task.clip_norm,
        servers=connections.servers,
    )


def train_exactly(connections: Connections, name: str, task: Task) -> Trained:
    """Train the exact model for a few steps. Ranks start with different weights.

    Warnings are errors in the workers, too: users would see one per worker.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return _train_exactly(connections, name, task)


def _train_exactly(connections: Connections, name: str, task: Task) -> Trained:
    communicator = connections.communicator
    counted_before = communicator.traffic.to_dict()
    model = ExactModel(task.unused)
    for weight in model.parameters():
        weight.data.add_(communicator.rank)
    strategy = create_strategy(name, options_of(name, task))
    replica = build_replica(model, connections, task)
    strategy.setup(replica)
    after_each_step = []
    for step, samples in enumerate(task.batches):
        train_step(strategy, step, samples, task)
        after_each_step.append(weights_of(strategy))
    strategy.finish()
    traffic = counted_since(counted_before, communicator)
    return Trained(after_each_step, weights_of(strategy), traffic)


def train_step(strategy: Strategy, step: int, samples: int, task: Task) -> None:
    """Update with the shard of this worker."""
    replica = strategy.replica
    world_size, rank = replica.communicator.world_size, replica.communicator.rank
    part = shard_bounds(samples, task.shares or [1.0] * world_size, rank)
    has_samples = part.stop > part.start
    # As in the training loop: a worker with an empty shard computes a sample of weight 0.
    inputs = exact_batch(step, samples)[part if has_samples else slice(0, 1)]
    weight = 1.0 / samples if has_samples else 0.0
    replica.begin_batch(part.stop - part.start, samples)
    chunks = inputs.tensor_split(min(task.accumulate, len(inputs)))
    for number, chunk in enumerate(chunks, 1):
        replica.is_last_microbatch = number == len(chunks)
        replica.clock.enter("forward")
        loss = replica.forward(chunk).sum() * weight
        replica.clock.enter("backward")
        strategy.backward(loss)
    strategy.step()


def weights_of(strategy: Strategy) -> Tensor:
    """Return all weights, concatenated. Collective."""
    names = [name for name, _ in strategy.replica.model.named_parameters()]
    state = strategy.checkpoint.model_state_dict()
    return torch.cat([state[name].flatten() for name in names])


def counted_since(
    before: dict[str, dict[str, int | float]], communicator: Communicator
) -> dict[str, dict[str, int | float]]:
    """Return the traffic of one worker since an earlier count."""
    now = communicator.traffic.to_dict()
    return {
        kind: {name: value - before[kind][name] for name, value in counts.items()}
        for kind, counts in now.items()
    }


def run_ranks(pool: WorkerPool, world_size: int, function: Any, name: str, task: Task) -> list[Any]:
    """Call `function(connections, name, task)` on every rank; return the results by rank.

    A single worker and workers with servers are threads, others are processes. A strategy may
    reject a task with a one-line error.
    """
    strategy = create_strategy(name, {})
    for error in strategy.check(RunConfig(precision="fp16" if task.loss_scale else "fp32")):
        pytest.skip(error)
    if isinstance(strategy, ServerStrategy):
        return _run_with_servers(world_size, function, name, task)
    if world_size == 1:
        return in_process.run(
            1, lambda communicator: function(Connections(communicator), name, task)
        )
    return pool.run(world_size, _run_rank, function, name, task, fresh=not _is_plain(name))


def _run_rank(communicator: Communicator, function: Any, name: str, task: Any) -> Any:
    return function(Connections(communicator), name, task)


def _run_with_servers(world_size: int, function: Any, name: str, task: Any) -> list[Any]:
    def make() -> ServerStrategy:
        strategy = create_strategy(name, dict(task.options))
        assert isinstance(strategy, ServerStrategy)
        return strategy

    return run_with_servers(
        world_size,
        make,
        lambda weight: task.make_optimizer([weight]),
        lambda communicator, servers: function(Connections(communicator, servers), name, task),
    )


def _is_plain(name: str) -> bool:
    """Return whether a strategy can reuse a group of workers."""
    # PyTorch's wrappers need the default process group, of which there is one at a time.
    chosen = STRATEGIES.load(name)
    return issubclass(chosen, GradientAveraging) and not issubclass(chosen, Ddp)


def takes(name: str, world_size: int) -> bool:
    """Return whether a strategy supports this number of workers."""
    chosen = STRATEGIES.load(name)
    most = chosen.max_world_size
    return most is None or world_size <= most


def strategy_cases(names: Sequence[str], world_sizes: Sequence[int]) -> list[tuple[str, int]]:
    return [(name, size) for name in names for size in world_sizes if takes(name, size)]
