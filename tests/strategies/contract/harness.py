"""A small training loop around one strategy, to be run by every worker of a team."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.in_process import InProcessGroup
from paceline.config import RunConfig
from paceline.data.sampling import shard_bounds
from paceline.measure.phase_clock import PhaseClock
from paceline.strategies import STRATEGIES, create_strategy
from paceline.strategies.ddp import Ddp
from paceline.strategies.gradient_averaging import GradientAveraging
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import ServerStrategy, Strategy
from tests.strategies.contract.exact import ExactModel, exact_batch
from tests.support.worker_pool import WorkerPool

SMALL_BUCKETS = {
    "overlap": {"bucket_mib": "0.001", "first_bucket_mib": "0.0001"},
    "ddp": {"bucket_mib": "0.001"},
}
"""So that the weights of the exact model fill several buckets, and the largest more than one."""


@dataclass(frozen=True)
class Task:
    """What to train; every batch size must be a power of two for the sums to be exact."""

    batches: tuple[int, ...] = (16, 16, 8, 2)
    """Samples in each global batch; the last has none for some of the workers."""
    shares: tuple[float, ...] = ()
    accumulate: int = 1
    clip_norm: float | None = None
    loss_scale: float | None = None
    unused: bool = False
    lr: float = 0.5
    momentum: float = 0.5
    weight_decay: float = 0.5
    options: tuple[tuple[str, str], ...] = ()
    """Of the strategy."""


@dataclass(frozen=True)
class Seat:
    """A worker's connections."""

    communicator: Communicator
    servers: Sequence[Communicator] = ()
    node: int = 0


@dataclass(frozen=True)
class Trained:
    """What one worker ended with."""

    after_each_step: list[Tensor]
    """All weights, one after the other."""
    final: Tensor
    traffic: dict[str, dict[str, int | float]]


def options_of(name: str, task: Task) -> dict[str, str]:
    options = {**SMALL_BUCKETS.get(name, {}), **dict(task.options)}
    if task.unused and name == "ddp":
        options["find_unused"] = "true"
    return options


def make_optimizer(weights: Iterable[nn.Parameter], task: Task) -> SGD:
    return SGD(weights, lr=task.lr, momentum=task.momentum, weight_decay=task.weight_decay)


def build_replica(model: nn.Module, seat: Seat, task: Task) -> Replica:
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    if task.loss_scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=task.loss_scale)
    return Replica(
        model=model,
        optimizer=make_optimizer(trainable, task),
        clock=PhaseClock(),
        forward=model,
        scaler=scaler,
        communicator=seat.communicator,
        node=seat.node,
        clip_norm=task.clip_norm,
        servers=seat.servers,
    )


def train_exactly(seat: Seat, name: str, task: Task) -> Trained:
    """A few steps of the exact model. Ranks begin with different weights, as attach must mend.

    A warning is an error, in the workers too: users would see it once for each of them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return _train_exactly(seat, name, task)


def _train_exactly(seat: Seat, name: str, task: Task) -> Trained:
    communicator = seat.communicator
    counted_before = communicator.traffic.to_dict()
    model = ExactModel(task.unused)
    for weight in model.parameters():
        weight.data.add_(communicator.rank)
    strategy = create_strategy(name, options_of(name, task))
    replica = build_replica(model, seat, task)
    strategy.setup(replica)
    after_each_step = []
    for step, samples in enumerate(task.batches):
        train_step(strategy, step, samples, task)
        after_each_step.append(weights_of(strategy))
    strategy.finish()
    traffic = counted_since(counted_before, communicator)
    return Trained(after_each_step, weights_of(strategy), traffic)


def train_step(strategy: Strategy, step: int, samples: int, task: Task) -> None:
    """One update with this worker's part of the global batch."""
    replica = strategy.replica
    world_size, rank = replica.communicator.world_size, replica.communicator.rank
    part = shard_bounds(samples, task.shares or [1.0] * world_size, rank)
    has_samples = part.stop > part.start
    # As in the training loop: a worker without a sample computes one that weighs nothing.
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
    """All weights, one after the other. Collective."""
    names = [name for name, _ in strategy.replica.model.named_parameters()]
    state = strategy.checkpoint.model_state_dict()
    return torch.cat([state[name].flatten() for name in names])


def counted_since(
    before: dict[str, dict[str, int | float]], communicator: Communicator
) -> dict[str, dict[str, int | float]]:
    """The traffic of one worker since an earlier count."""
    now = communicator.traffic.to_dict()
    return {
        kind: {name: value - before[kind][name] for name, value in counts.items()}
        for kind, counts in now.items()
    }


def run_team(pool: WorkerPool, world_size: int, function: Any, name: str, task: Task) -> list[Any]:
    """Call `function(seat, name, task)` on every rank; the results, by rank.

    Workers that are alone or have servers are threads, the others processes. A strategy may refuse
    a task, with a line that says so.
    """
    strategy = create_strategy(name, {})
    for refusal in strategy.check(RunConfig(precision="fp16" if task.loss_scale else "fp32")):
        pytest.skip(refusal)
    if isinstance(strategy, ServerStrategy):
        return _run_with_servers(world_size, function, name, task)
    if world_size == 1:
        return in_process.run(1, lambda communicator: function(Seat(communicator), name, task))
    return pool.run(world_size, _sit_down, function, name, task, fresh=not _is_plain(name))


def _sit_down(communicator: Communicator, function: Any, name: str, task: Any) -> Any:
    return function(Seat(communicator), name, task)


def _run_with_servers(world_size: int, function: Any, name: str, task: Any) -> list[Any]:
    strategy = create_strategy(name, {})
    assert isinstance(strategy, ServerStrategy)
    nodes = strategy.server_nodes(1)
    pairs = [[InProcessGroup(2) for _ in range(world_size)] for _ in nodes]

    def serve(number: int) -> None:
        ends = [hub.communicators[0] for hub in pairs[number]]
        strategy = create_strategy(name, {})
        assert isinstance(strategy, ServerStrategy)
        strategy.serve(number, ends, lambda weight: make_optimizer([weight], task))

    def work(communicator: Communicator) -> Any:
        ends = [hubs[communicator.rank].communicators[1] for hubs in pairs]
        try:
            return function(Seat(communicator, ends), name, task)
        finally:
            for end in ends:
                end.close()

    threads = [Thread(target=serve, args=(number,)) for number in range(len(pairs))]
    for thread in threads:
        thread.start()
    try:
        return in_process.run(world_size, work)
    finally:
        for thread in threads:
            thread.join(10.0)


def _is_plain(name: str) -> bool:
    """Whether a strategy can share a group of workers with others."""
    # PyTorch's own wrappers need the process-wide group, of which there is one at a time.
    chosen = STRATEGIES.load(name)
    return issubclass(chosen, GradientAveraging) and not issubclass(chosen, Ddp)


def takes(name: str, world_size: int) -> bool:
    """Whether a strategy is for so many workers."""
    chosen = STRATEGIES.load(name)
    most = chosen.max_world_size
    return most is None or world_size <= most


def teams(names: Sequence[str], world_sizes: Sequence[int]) -> list[tuple[str, int]]:
    return [(name, size) for name in names for size in world_sizes if takes(name, size)]
