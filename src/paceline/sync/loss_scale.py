"""fp16's loss scaling where torch's own needs a hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.sync.quick_step import QuickStep


def step_unless_overflown(scaler: torch.amp.GradScaler, step: QuickStep) -> None:
    """Let the scaler step, or pass the step over where a gradient left fp16's range.

    An optimiser without any state must have been unscaled before: when torch's fused SGD passes its
    first step over, it takes memory that nobody has filled for its momentum.
    """
    optimizer = step.optimizer
    if not scaler.is_enabled():
        step()
    elif optimizer.state or not float(overflow(scaler, optimizer)):
        scaler.step(optimizer)


def overflow(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Tensor:
    """Where the scaler keeps 1 if an unscaled gradient was not finite, else 0.

    torch has no public way to it.
    """
    states: dict[int, dict[str, Any]] = scaler._per_optimizer_states
    found: dict[torch.device, Tensor] = states[id(optimizer)]["found_inf_per_device"]
    return next(iter(found.values()))
