"""The optimizer step: a fast path for fused SGD, and fp16 loss scaling that skips overflows.

For a small model on a CPU, most of `optimizer.step()` is Python code that collects the same tensors
in every step. `FusedSgdStep` caches them and calls the same kernel, so results are equal bit for
bit. If anything has changed, it falls back to `optimizer.step()`.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as optimizer_module


def step_unless_overflow(scaler: torch.amp.GradScaler, step: FusedSgdStep) -> None:
    """Run the optimizer, unless a gradient overflowed in fp16.

    Gradients of an optimizer that lacks its momentum must already be unscaled: if torch's fused SGD
    skips its first step, its momentum is uninitialized memory.
    """
    optimizer = step.optimizer
    if not scaler.is_enabled():
        step()
    elif not lacks_momentum(optimizer) or not float(overflow(scaler, optimizer)):
        scaler.step(optimizer)


def lacks_momentum(optimizer: Optimizer) -> bool:
    """Return whether the next step creates the momentum of the weights."""
    return not optimizer.state and any(group.get("momentum") for group in optimizer.param_groups)


def overflow(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Tensor:
    """Return the scaler's flag: 1 if an unscaled gradient is not finite, else 0.

    torch has no public function for it.
    """
    states: dict[int, dict[str, Any]] = scaler._per_optimizer_states
    found: dict[torch.device, Tensor] = states[id(optimizer)]["found_inf_per_device"]
    return next(iter(found.values()))


def discard_unscaling(scaler: torch.amp.GradScaler) -> None:
    """Let the scaler unscale gradients again; it refuses to do so twice before an update.

    torch has no public function for it.
    """
    if scaler.is_enabled():
        scaler._per_optimizer_states.clear()


class FusedSgdStep:
    """Calls the kernel of fused SGD directly if nothing has changed since the last step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._cached: list[_Group] | None = None
        """The parameter groups after the last `optimizer.step()`."""
        self._state: Any = None

    def __call__(self) -> None:
        optimizer = self.optimizer
        # Loading a state dict replaces the object.
        is_unchanged = optimizer.state is self._state and not _is_hooked(optimizer)
        if not is_unchanged or self._cached is None or not self._step(self._cached):
            optimizer.step()
            self._state, self._cached = optimizer.state, _groups(optimizer)

    def _step(self, cached: list[_Group]) -> bool:
        groups = self.optimizer.param_groups
        if len(groups) != len(cached):
            return False
        gradients = [cache.gradients(group) for cache, group in zip(cached, groups, strict=True)]
        if any(found is None for found in gradients):
            return False
        with torch.no_grad():
            for cache, group, found in zip(cached, groups, gradients, strict=True):
                assert found is not None
                cache.step(group, found)
        return True


class _Group:
    """The cached tensors of one parameter group."""

    def __init__(self, weights: list[Tensor], momenta: list[Tensor]) -> None:
        self.weights, self.momenta = weights, momenta

    def gradients(self, group: dict[str, Any]) -> list[Tensor] | None:
        """Return the gradients; None if the group changed or a gradient is missing or sparse."""
        weights = group["params"]
        if len(weights) != len(self.weights) or not all(map(is_, weights, self.weights)):
            return None
        if bool(group["momentum"]) != bool(self.momenta) or isinstance(group["lr"], Tensor):
            return None
        found = [weight.grad for weight in weights]
        if any(each is None or each.layout != torch.strided for each in found):
            return None
        return found

    def step(self, group: dict[str, Any], gradients: list[Tensor]) -> None:
        torch._fused_sgd_(
            self.weights,
            gradients,
            self.momenta,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
        )


def _groups(optimizer: Optimizer) -> list[_Group] | None:
    """Return the tensors to cache; None if the fast path does not apply."""
    if type(optimizer) is not SGD:
        return None
    groups = []
    for group in optimizer.param_groups:
        weights = group["params"]
        kinds = {(weight.dtype, weight.device.type, weight.layout) for weight in weights}
        if not group["fused"] or group["differentiable"] or len(kinds) != 1:
            return None
        if any(device != "cpu" or layout != torch.strided for _, device, layout in kinds):
            return None
        momenta = [optimizer.state.get(weight, {}).get("momentum_buffer") for weight in weights]
        if not group["momentum"]:
            momenta = []
        elif any(momentum is None for momentum in momenta):
            return None
        groups.append(_Group(list(weights), momenta))
    return groups


def _is_hooked(optimizer: Optimizer) -> bool:
    """Return whether hooks are registered or `step` is replaced."""
    return bool(
        "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or optimizer_module._global_optimizer_post_hooks
    )
