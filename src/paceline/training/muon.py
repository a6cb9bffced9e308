"""Muon: momentum whose update of every weight matrix is orthogonalized.

An update with equal singular values trains all directions of a matrix at the same rate, so that
fewer steps are needed. Convolution kernels count as matrices with one row per output channel;
biases and other vectors are updated by AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Map every singular value in (0, 1] close to 1 in few steps, instead of exactly to 1."""

ADAM_UPDATE_RMS = 0.2
"""Typical root mean square of AdamW's updates. Scaled to it, both parts use one learning rate."""


class Muon(Optimizer):
    """Updates tensors of two or more dimensions by Muon with Nesterov momentum, others by AdamW.

    The update of a matrix depends on all of its elements, so its weights cannot be sharded.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    update = _update_matrix if weight.dim() > 1 else _update_vector
                    update(weight, weight.grad, self.state[weight], group)
        return loss


def _update_matrix(
    weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    if not state:
        state["momentum_buffer"] = torch.zeros_like(weight)
    average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
    ahead = gradient.lerp(average, group["momentum"]).flatten(1)
    scale = ADAM_UPDATE_RMS * math.sqrt(max(ahead.shape))
    update = orthogonalize(ahead).view(weight.shape)
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(update, alpha=-group["lr"] * scale)


def _update_vector(
    weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(weight)
        state["exp_avg_sq"] = torch.zeros_like(weight)
    state["step"] += 1
    steps, (beta1, beta2) = float(state["step"]), group["betas"]
    average = state["exp_avg"].lerp_(gradient, 1 - beta1)
    square = state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
    root = square.div(1 - beta2**steps).sqrt_().add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.addcdiv_(average, root, value=-group["lr"] / (1 - beta1**steps))


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return the matrix with all singular values close to 1, by Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    # The product with the transpose is smaller for a wide matrix.
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    # The Frobenius norm is at least the largest singular value.
    wide = wide / wide.norm().clamp_min(torch.finfo(matrix.dtype).tiny)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.T if is_tall else wide).contiguous()
