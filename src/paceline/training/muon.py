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
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is the precision of the orthogonalization; bf16 is much faster on a GPU."""
        self._dtype = dtype
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            # `load_state_dict` moves `step` to the device of its weight, as the kernel requires.
            "fused": True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [weight for weight in group["params"] if weight.grad is not None]
            for weight in trained:
                if weight.dim() > 1:
                    _update_matrix(weight, self.state[weight], group, self._dtype)
            vectors = [weight for weight in trained if weight.dim() <= 1]
            if vectors:
                _update_vectors(vectors, [self.state[weight] for weight in vectors], group)
        return loss


def _update_matrix(
    weight: Tensor, state: dict[str, Any], group: dict[str, Any], dtype: torch.dtype
) -> None:
    gradient = weight.grad
    assert gradient is not None
    if not state:
        state["momentum_buffer"] = torch.zeros_like(weight)
    average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
    ahead = gradient.lerp(average, group["momentum"]).flatten(1)
    scale = ADAM_UPDATE_RMS * math.sqrt(max(ahead.shape))
    if group["weight_decay"]:
        weight.mul_(1 - group["lr"] * group["weight_decay"])
    update = orthogonalize(ahead, dtype).view(weight.shape)
    if isinstance(group["lr"], Tensor):
        weight.addcmul_(update, group["lr"], value=-scale)
    else:
        weight.add_(update, alpha=-group["lr"] * scale)


def _update_vectors(
    weights: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]
) -> None:
    for weight, state in zip(weights, states, strict=True):
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        weights,
        [weight.grad for weight in weights if weight.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def orthogonalize(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix with all singular values close to 1, by Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    # The product with the transpose is smaller for a wide matrix. The product of all factors first
    # would be faster, but amplifies rounding errors: replicas would differ from one worker.
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    # The Frobenius norm is at least the largest singular value.
    wide = (wide / wide.norm().clamp_min(torch.finfo(matrix.dtype).tiny)).to(dtype)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.T if is_tall else wide).to(matrix.dtype).contiguous()
