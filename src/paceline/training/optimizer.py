"""Optimizer (fused) and learning-rate schedule of a configuration."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.config import RunConfig
from paceline.training.muon import Muon

ONE_CYCLE_RISE = 0.3
"""Fraction of the run in which one_cycle rises to its peak."""
ONE_CYCLE_START = 1 / 25
"""Initial learning rate of one_cycle, as a fraction of the peak."""

Schedule = Callable[[int], float]


def learning_rate(config: RunConfig, batches_per_epoch: int) -> Schedule:
    """Return a function from iteration to learning rate, with batch-size scaling and warm-up."""
    total = config.iterations_in_total(batches_per_epoch)
    scale = config.learning_rate_scale
    shape = _shape(config, total, batches_per_epoch)
    warmup = round(config.warmup_epochs * batches_per_epoch)

    def rate(iteration: int) -> float:
        # Iteration 0 of a warm-up of n iterations gets 1/n of the rate, not zero.
        risen = min(1.0, (iteration + 1) / warmup) if warmup else 1.0
        return scale * risen * shape(iteration)

    return rate


def _shape(config: RunConfig, total: int, batches_per_epoch: int) -> Schedule:
    if config.schedule == "steps":
        return _steps(config.lr_by_epochs(), batches_per_epoch)
    peak = config.lr
    if config.schedule == "cosine":
        return lambda iteration: peak * _half_cosine(iteration / total)
    if config.schedule == "linear":
        return lambda iteration: peak * max(0.0, 1 - iteration / total)
    if config.schedule == "one_cycle":
        return lambda iteration: peak * _one_cycle(iteration / total)
    return lambda _: peak


def _steps(pairs: list[tuple[float, float]], batches_per_epoch: int) -> Schedule:
    """Apply each rate for its epochs, and the last one for all remaining epochs."""
    ends, end = [], 0.0
    for rate, epochs in pairs:
        end += epochs * batches_per_epoch
        ends.append((end, rate))

    def shape(iteration: int) -> float:
        return next((rate for end, rate in ends if iteration < end), ends[-1][1])

    return shape


def _half_cosine(progress: float) -> float:
    """1 at the start, 0 at the end."""
    return (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def _one_cycle(progress: float) -> float:
    if progress < ONE_CYCLE_RISE:
        risen = 1 - _half_cosine(progress / ONE_CYCLE_RISE)
        return ONE_CYCLE_START + (1 - ONE_CYCLE_START) * risen
    return _half_cosine((progress - ONE_CYCLE_RISE) / (1 - ONE_CYCLE_RISE))


def build_optimizer(
    config: RunConfig,
    parameters: Iterable[nn.Parameter],
    undecayed: Iterable[nn.Parameter] = (),
) -> Optimizer:
    """Build the optimizer of the trained weights among `parameters`.

    Those in `undecayed` form a second parameter group, without weight decay; Muon leaves them to
    AdamW.
    """
    for each in (SGD, Adam, AdamW):
        _avoid_dynamo(each)
    weights = [weight for weight in parameters if weight.requires_grad]
    apart = {id(weight) for weight in undecayed}
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in weights if id(weight) not in apart]},
        {"params": [weight for weight in weights if id(weight) in apart], "weight_decay": 0.0},
    ]
    if config.optimizer == "muon":
        groups[1]["orthogonalize"] = False
    optimizer = _create(config, [group for group in groups if group["params"]])
    if weights and weights[0].is_cuda:
        keep_rate_on_device(optimizer, weights[0].device)
    return optimizer


def keep_rate_on_device(optimizer: Optimizer, device: torch.device) -> None:
    """Make the learning rate a tensor, so that a CUDA graph reads its current value.

    State dicts contain plain numbers, and can be loaded on any device.
    """

    def to_device(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
            if "capturable" in group:
                group["capturable"] = True

    def to_numbers(_: Optimizer, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["lr"] = float(group["lr"])

    to_device(optimizer)
    optimizer.register_load_state_dict_post_hook(to_device)
    optimizer.register_state_dict_post_hook(to_numbers)


def _create(config: RunConfig, groups: list[dict[str, Any]]) -> Optimizer:
    if config.optimizer == "sgd":
        return SGD(
            groups,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            fused=True,
        )
    if config.optimizer == "muon":
        is_half = config.precision != "fp32" and any(group["params"][0].is_cuda for group in groups)
        return Muon(
            groups,
            lr=config.lr,
            momentum=config.momentum,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            dtype=torch.bfloat16 if is_half else torch.float32,
        )
    kind: type[Adam] = {"adam": Adam, "adamw": AdamW}[config.optimizer]
    return kind(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _avoid_dynamo(kind: type[Optimizer]) -> None:
    """Keep the methods of an optimizer from importing torch._dynamo, which takes a second.

    They import it to be excluded from torch.compile; only models are compiled here.
    """
    for method in (
        Optimizer.add_param_group,
        Optimizer.zero_grad,
        Optimizer.state_dict,
        Optimizer.load_state_dict,
        Optimizer.register_state_dict_post_hook,
        Optimizer.register_load_state_dict_post_hook,
    ):
        if function := getattr(method, "__wrapped__", None):
            function.__dynamo_disable = function
    decorated = kind.step
    if decorated.__code__.co_name == "_use_grad":
        step = decorated.__wrapped__  # type: ignore[attr-defined]  # update_wrapper sets it

        @functools.wraps(step)
        def step_with_grad_mode(self: Optimizer, *arguments: Any) -> Any:
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *arguments)

        kind.step = step_with_grad_mode  # type: ignore[assignment, method-assign]


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
