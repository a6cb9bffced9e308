"""fp16's loss scaling where torch's own needs a hand.

The step of torch's fused SGD without the Python around it.

For a small model on a CPU the kernel is the smaller part of `optimizer.step()`; the rest goes
through every weight again to find what was there the step before. This keeps what was found. It
runs the very same kernel on the same tensors, so the result is the same bit for bit; wherever
anything is unusual it leaves the step to the optimizer."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as of_all


def step_unless_overflow(scaler: torch.amp.GradScaler, step: FusedSgdStep) -> None:
    """Let the scaler step, or pass the step over where a gradient left fp16's range.

    An optimizer without any state must have been unscaled before: when torch's fused SGD passes its
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


class FusedSgdStep:
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._known: list[_Group] | None = None
        """What the groups were like after the last step that the optimizer took itself."""
        self._state: Any = None

    def __call__(self) -> None:
        optimizer = self.optimizer
        # A state that was loaded is another object.
        is_usual = optimizer.state is self._state and not _is_hooked(optimizer)
        if not is_usual or self._known is None or not self._take(self._known):
            optimizer.step()
            self._state, self._known = optimizer.state, _groups(optimizer)

    def _take(self, known: list[_Group]) -> bool:
        groups = self.optimizer.param_groups
        if len(groups) != len(known):
            return False
        gradients = [own.gradients(group) for own, group in zip(known, groups, strict=True)]
        if any(found is None for found in gradients):
            return False
        with torch.no_grad():
            for own, group, found in zip(known, groups, gradients, strict=True):
                assert found is not None
                own.step(group, found)
        return True


class _Group:
    """Weights that share their settings, with their momentum."""

    def __init__(self, weights: list[Tensor], momenta: list[Tensor]) -> None:
        self.weights, self.momenta = weights, momenta

    def gradients(self, group: dict[str, Any]) -> list[Tensor] | None:
        """None where weights or settings are others by now, or a gradient is missing or odd."""
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
    """What is to be known of an optimizer's groups; None where it is not the usual one."""
    if type(optimizer) is not SGD:
        return None
    known = []
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
        known.append(_Group(list(weights), momenta))
    return known


def _is_hooked(optimizer: Optimizer) -> bool:
    """Whether somebody wants to know of each step: by a hook, or by a `step` of their own."""
    return bool(
        "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or of_all._global_optimizer_pre_hooks
        or of_all._global_optimizer_post_hooks
    )
