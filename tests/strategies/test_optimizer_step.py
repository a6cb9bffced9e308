"""The fused SGD step is bit-identical to the optimizer, and is used only where it applies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from paceline.strategies.optimizer_step import FusedSgdStep


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in (33, 1, 200)]


def optimizer_of(members: list[nn.Parameter], **settings: Any) -> SGD:
    groups: list[dict[str, Any]] = [{"params": members[:1]}, {"params": members[1:], "lr": 0.3}]
    return SGD(groups, lr=0.1, fused=True, **settings)


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(size, generator=generator) for size in (33, 1, 200)]


def train(
    step_of: Callable[[Optimizer], Callable[[], Any]],
    between: Callable[[int, Optimizer], None],
    **settings: Any,
) -> list[Tensor]:
    members = weights()
    optimizer = optimizer_of(members, **settings)
    step = step_of(optimizer)
    for number in range(6):
        for weight, gradient in zip(members, gradients(number), strict=True):
            weight.grad = gradient
        between(number, optimizer)
        step()
    return [weight.detach() for weight in members]


def nothing(number: int, optimizer: Optimizer) -> None:
    return


def lower_rate(number: int, optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = 0.3 / (1 + number)


def load_own_state(number: int, optimizer: Optimizer) -> None:
    if number == 3:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def lose_a_gradient(number: int, optimizer: Optimizer) -> None:
    if number == 3:
        optimizer.param_groups[1]["params"][0].grad = None


def end_momentum(number: int, optimizer: Optimizer) -> None:
    if number == 3:
        optimizer.param_groups[0]["momentum"] = 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}],
    ids=["plain", "momentum", "nesterov"],
)
@pytest.mark.parametrize(
    "between", [nothing, lower_rate, load_own_state, lose_a_gradient, end_momentum]
)
def test_fused_step_matches_the_optimizer(
    between: Callable[[int, Optimizer], None], settings: dict[str, Any]
) -> None:
    if between is end_momentum and settings.get("nesterov"):
        settings = {"momentum": 0.9, "weight_decay": 0.01}
    expected = train(lambda optimizer: optimizer.step, between, **settings)
    assert all(map(torch.equal, train(FusedSgdStep, between, **settings), expected))


def counted(optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the steps that the optimizer takes itself."""
    calls: list[int] = []
    original = type(optimizer).step

    def step(self: Optimizer) -> None:
        calls.append(1)
        original(self)

    monkeypatch.setattr(type(optimizer), "step", step)
    return calls


@pytest.mark.parametrize(("kind", "own_steps"), [(SGD, 1), (Adam, 4)])
def test_only_the_first_step_calls_the_optimizer(
    kind: type[Optimizer], own_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = weights()
    optimizer = kind(members, lr=0.1, fused=True)  # type: ignore[call-arg]
    calls = counted(optimizer, monkeypatch)
    step = FusedSgdStep(optimizer)
    for number in range(4):
        for weight, gradient in zip(members, gradients(number), strict=True):
            weight.grad = gradient
        step()
    assert len(calls) == own_steps


def test_hooks_registered_later_are_called() -> None:
    seen: list[int] = []

    def between(number: int, optimizer: Optimizer) -> None:
        if number == 2:
            optimizer.register_step_post_hook(lambda *_: seen.append(1))

    train(FusedSgdStep, between)
    assert len(seen) == 4


def test_scheduler_does_not_warn_about_missing_optimizer_steps() -> None:
    """A scheduler that changes the rate before the first step warns, which fails the test."""
    members = weights()
    optimizer = optimizer_of(members, momentum=0.9)
    step = FusedSgdStep(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for number in range(3):
        for weight, gradient in zip(members, gradients(number), strict=True):
            weight.grad = gradient
        step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
