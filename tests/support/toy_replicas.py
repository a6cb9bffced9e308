"""Small replicas to test the arithmetic of strategies, with threads as workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.data.sampling import shard_bounds
from paceline.measure.phase_clock import PhaseClock
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy

SAMPLES, FEATURES, CLASSES = 24, 5, 3

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def sgd(rate: float = 0.1, momentum: float = 0.9) -> MakeOptimizer:
    return lambda weights: torch.optim.SGD(weights, lr=rate, momentum=momentum)


def adam(rate: float = 0.01) -> MakeOptimizer:
    return lambda weights: torch.optim.Adam(weights, lr=rate)


def replica(
    communicator: Communicator, optimizer: MakeOptimizer, seed: int = 0, **settings: Any
) -> Replica:
    """Two linear layers. Each rank starts with different weights, which `setup` makes equal."""
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    # The threads share torch's default generator.
    generator = torch.Generator().manual_seed(seed + 1000 * communicator.rank)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    return Replica(
        model=model,
        optimizer=optimizer(list(model.parameters())),
        clock=PhaseClock(),
        forward=model,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        communicator=communicator,
        **settings,
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def compute(strategy: Strategy, step: int, part: int, shares: Sequence[float]) -> None:
    """Forward and backward pass over a shard, with the loss weighted as in the training loop."""
    inputs, labels = batch(step)
    own, chosen = strategy.replica, shard_bounds(SAMPLES, shares, part)
    own.batch_fraction = (chosen.stop - chosen.start) / SAMPLES
    loss = F.cross_entropy(own.forward(inputs[chosen]), labels[chosen])
    strategy.backward(loss * own.batch_fraction)


def train(strategy: Strategy, steps: range, shares: Sequence[float] | None = None) -> None:
    """Train synchronously on this worker's shard of each batch."""
    communicator = strategy.replica.communicator
    for step in steps:
        compute(strategy, step, communicator.rank, shares or [1.0] * communicator.world_size)
        strategy.step()


def weights_of(own: Replica) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in own.model.parameters()])


def trained(
    world_size: int,
    make: Callable[[], Strategy],
    steps: int,
    optimizer: MakeOptimizer,
    shares: Sequence[float] | None = None,
    finish: bool = True,
) -> list[Tensor]:
    """Return the weights of every worker after `steps` steps."""

    def work(communicator: Communicator) -> Tensor:
        strategy = make()
        strategy.setup(replica(communicator, optimizer))
        train(strategy, range(steps), shares)
        if finish:
            strategy.finish()
        return weights_of(strategy.replica)

    return in_process.run(world_size, work)


def resumes_exactly(make: Callable[[], Strategy], cut: int, steps: int) -> bool:
    """Return whether a run resumed after `cut` steps ends with the weights of a whole run."""

    def work(communicator: Communicator) -> bool:
        whole, before, after = make(), make(), make()
        for strategy in (whole, before, after):
            strategy.setup(replica(communicator, adam()))
        train(whole, range(steps))
        train(before, range(cut))
        # As a checkpoint does: rank 0's state for all ranks, then the state of each rank.
        after.replica.model.load_state_dict(before.replica.model.state_dict())
        after.checkpoint.load_optimizer_state_dict(before.checkpoint.optimizer_state_dict())
        after.load_state_dict(before.state_dict())
        train(after, range(cut, steps))
        for strategy in (whole, after):
            strategy.finish()
        return torch.equal(weights_of(whole.replica), weights_of(after.replica))

    return all(in_process.run(2, work))
