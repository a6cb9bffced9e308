"""Weights of odd sizes with integer gradients, for strategies that shard weights.

The loss is linear in the weights, so gradients are sums of integers: exact in any order. The
optimizer rounds each element independently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.comm.communicator import Communicator
from paceline.measure.phase_clock import PhaseClock
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy

S = TypeVar("S", bound=Strategy)

SHAPES = ((7, 13), (5,), (33, 3, 3, 3), (1,), (2, 101))
SAMPLES = 12

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda weights: SGD(weights, lr=0.01, fused=True),
    "momentum": lambda weights: SGD(weights, lr=0.01, momentum=0.9, fused=True),
    "nesterov": lambda weights: SGD(
        weights, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True
    ),
    "adam": lambda weights: Adam(weights, lr=0.01, weight_decay=0.01, fused=True),
    "adamw": lambda weights: AdamW(weights, lr=0.01, weight_decay=0.01, fused=True),
    "unfused": lambda weights: Adam(weights, lr=0.01),
}


class Layer(nn.Module):
    """One weight, multiplied by one integer per sample and element."""

    def __init__(self, number: int, shape: tuple[int, ...], channels_last: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        value = torch.randn(shape, generator=generator)
        if channels_last and len(shape) == 4:
            value = value.contiguous(memory_format=torch.channels_last)
        self.weight = nn.Parameter(value)
        self.number = number

    def forward(self, samples: Tensor) -> Tensor:
        """`samples` are seeds."""
        outputs = []
        for seed in samples.tolist():
            generator = torch.Generator().manual_seed(1000 * self.number + int(seed))
            whole = torch.randint(-8, 9, self.weight.shape, generator=generator)
            outputs.append((whole * self.weight).sum())
        return torch.stack(outputs)


class OddModel(nn.Module):
    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        layers = [Layer(number, shape, channels_last) for number, shape in enumerate(SHAPES)]
        self.layers = nn.ModuleList(layers)
        self.register_buffer("steps_seen", torch.zeros(1))

    def forward(self, samples: Tensor) -> Tensor:
        return torch.stack([layer(samples) for layer in self.layers]).sum(0)


def build(
    communicator: Communicator,
    optimizer: str | Callable[[Any], Optimizer] = "nesterov",
    model: nn.Module | None = None,
    **settings: Any,
) -> Replica:
    """Each rank starts with different weights, which `setup` makes equal."""
    model = model or OddModel()
    for weight in model.parameters():
        weight.data.mul_(1 + communicator.rank)
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    scaler = settings.pop("scaler", None) or torch.amp.GradScaler("cpu", enabled=False)
    return Replica(
        model=model,
        optimizer=make(list(model.parameters())),
        clock=PhaseClock(),
        forward=model,
        scaler=scaler,
        communicator=communicator,
        **settings,
    )


def train(strategy: Strategy, steps: range) -> None:
    """Train on every n-th sample (n = world size); the learning rate changes at each step."""
    communicator = strategy.replica.communicator
    for step in steps:
        for group in strategy.replica.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        samples = torch.arange(SAMPLES)[communicator.rank :: communicator.world_size]
        strategy.backward(strategy.replica.forward(samples + step * SAMPLES).sum())
        strategy.step()


def attached(strategy: S, replica: Replica) -> S:
    strategy.setup(replica)
    return strategy


def weights_of(strategy: Strategy) -> Tensor:
    """Return all weights. Collective."""
    state = strategy.checkpoint.model_state_dict()
    names = [name for name in state if name.endswith("weight")]
    return torch.cat([state[name].detach().flatten() for name in names])


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two optimizer states are identical, including shapes and settings."""
    if one["param_groups"] != other["param_groups"] or one["state"].keys() != other["state"].keys():
        return False
    for number, values in one["state"].items():
        theirs = other["state"][number]
        if values.keys() != theirs.keys():
            return False
        for name, value in values.items():
            same = torch.equal(value, theirs[name]) and value.dtype == theirs[name].dtype
            if not same:
                return False
    return True
