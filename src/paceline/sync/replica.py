"""What one worker trains: its model, its optimiser, and how an update is applied to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.measure.clock import PhaseClock


@dataclass(slots=True)
class Replica:
    """A worker's copy of the training state, as a strategy sees it."""

    model: nn.Module
    optimizer: Optimizer
    clock: PhaseClock
    forward: Callable[[Tensor], Tensor]
    """What the loop calls: the model, compiled or wrapped."""
    scaler: torch.amp.GradScaler
    """Keeps fp16 gradients in range; does nothing in the other precisions."""
    clip_norm: float | None = None
    last_part: bool = True
    """Whether the backward pass at hand is the last one before the update (accumulation)."""
    trainable: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.trainable = [weight for weight in self.model.parameters() if weight.requires_grad]

    def backward(self, loss: Tensor) -> None:
        """Add this loss's gradients to those of the batch's earlier parts."""
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        """Clip, apply the optimiser, and forget the gradients."""
        self.clock.enter("update")
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.trainable, self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
