"""Muon: momentum whose update of every weight matrix is orthogonalized.

An update with equal singular values trains all directions of a matrix at the same rate, so that
fewer steps are needed. Convolution kernels count as matrices with one row per output channel;
biases and other vectors are updated by AdamW. So are embeddings, of which a step uses few rows.
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

MAX_PADDED_ELEMENTS = 1 << 24
"""Up to this size, starting kernels takes a GPU longer than the additional work on the padding."""

ADAM_UPDATE_RMS = 0.2
"""Typical root mean square of AdamW's updates. Scaled to it, both parts use one learning rate."""


class Muon(Optimizer):
    """Updates tensors of two or more dimensions by Muon with Nesterov momentum, others by AdamW.

    AdamW updates all weights of a parameter group with `orthogonalize=False`. The update of a
    matrix depends on all of its elements, so its weights cannot be sharded.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
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
            "orthogonalize": True,
            # `load_state_dict` moves `step` to the device of its weight, as the kernel requires.
            "fused": True,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            # Older checkpoints do not have it.
            group.setdefault("orthogonalize", True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [weight for weight in group["params"] if weight.grad is not None]
            is_plain = not group["orthogonalize"]
            matrices = [weight for weight in trained if weight.dim() > 1 and not is_plain]
            if matrices:
                states = [self.state[weight] for weight in matrices]
                _update_matrices(matrices, states, group, self._dtype)
            others = [weight for weight in trained if weight.dim() <= 1 or is_plain]
            if others:
                _update_elementwise(others, [self.state[weight] for weight in others], group)
        return loss


def _update_matrices(
    weights: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any], dtype: torch.dtype
) -> None:
    for weight, state in zip(weights, states, strict=True):
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    averages = [state["momentum_buffer"] for state in states]
    torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
    ahead = torch._foreach_lerp(gradients, averages, group["momentum"])
    matrices = [each.flatten(1) for each in ahead]
    updates = orthogonalize_all(matrices, dtype)
    if group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
    for weight, update in zip(weights, updates, strict=True):
        scale = ADAM_UPDATE_RMS * math.sqrt(max(update.shape))
        update = update.unflatten(1, weight.shape[1:])
        if isinstance(group["lr"], Tensor):
            weight.addcmul_(update, group["lr"], value=-scale)
        else:
            weight.add_(update, alpha=-group["lr"] * scale)


def _update_elementwise(
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


def orthogonalize_all(matrices: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Orthogonalize matrices one by one, or on a GPU in one batch if they are small."""
    if not matrices[0].is_cuda:
        return [orthogonalize(matrix, dtype) for matrix in matrices]
    padded = len(matrices) * math.prod(_largest_shape(matrices))
    if padded <= MAX_PADDED_ELEMENTS:
        return orthogonalize_batch(matrices, dtype)
    return [orthogonalize_batch([matrix], dtype)[0] for matrix in matrices]


def orthogonalize(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix with all singular values close to 1."""
    wide = _wide(matrix)
    # The Frobenius norm is at least the largest singular value.
    wide = wide / wide.norm().clamp_min(torch.finfo(matrix.dtype).tiny)
    wide = _iterate(wide.to(dtype)).to(matrix.dtype)
    return (wide.T if _is_tall(matrix) else wide).contiguous()


def orthogonalize_batch(matrices: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Orthogonalize matrices of any shapes together; the padding by zeros does not change them."""
    rows, columns = _largest_shape(matrices)
    batch = matrices[0].new_zeros(len(matrices), rows, columns)
    parts = [
        padded[: wide.shape[0], : wide.shape[1]].copy_(wide)
        for padded, wide in zip(batch, map(_wide, matrices), strict=True)
    ]
    norms = batch.flatten(1).norm(dim=1).clamp_min(torch.finfo(batch.dtype).tiny)
    batch.copy_(_iterate((batch / norms.view(-1, 1, 1)).to(dtype)))
    return [
        part.T if _is_tall(matrix) else part for part, matrix in zip(parts, matrices, strict=True)
    ]


def _iterate(wide: Tensor) -> Tensor:
    """Apply Newton-Schulz iterations to a matrix, or to each of a batch."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    multiply_add = torch.addmm if wide.dim() == 2 else torch.baddbmm
    # The product of all factors first would be faster, but amplifies rounding errors: replicas
    # would differ from one worker.
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.mT
        wide = multiply_add(wide, multiply_add(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide


def _wide(matrix: Tensor) -> Tensor:
    """Return the matrix or its transpose: the product with the transpose of a wide one is small."""
    return matrix.T if _is_tall(matrix) else matrix


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def _largest_shape(matrices: list[Tensor]) -> tuple[int, int]:
    """Return the shape that has room for the wide form of each matrix."""
    shapes = [_wide(matrix).shape for matrix in matrices]
    return max(rows for rows, _ in shapes), max(columns for _, columns in shapes)
