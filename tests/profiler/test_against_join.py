"""A profile and `paceline.join` mean the same by their phases: both measure the same loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.analysis.phases import run_iteration_breakdown
from paceline.analysis.run import open_run
from paceline.strategies.replica import Replica

STEPS, BATCH = 6, 2
TRACKING = [
    f"paceline.profiler.tracking.{name}" for name in ("event_queue", "notes", "step_tracker")
]
"""Modules that read the time for phases."""


class Clock:
    """Time passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("paceline.measure.phase_clock", *TRACKING):
        monkeypatch.setattr(f"{module}.perf_counter", clock)

    def take_time(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def clear(self: Any) -> None:
            clock.pass_seconds(0.125)
            original(self)

        monkeypatch.setattr(owner, name, clear)

    take_time(Optimizer, "zero_grad")
    take_time(Replica, "clear_gradients")
    return clock


class Samples(Dataset[Tensor]):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> Tensor:
        self.clock.pass_seconds(1 / BATCH)
        return torch.ones(2)


class Delayed(torch.autograd.Function):
    """The identity, whose backward pass takes time."""

    @staticmethod
    def forward(context: Any, values: Tensor, clock: Clock) -> Tensor:
        context.clock = clock
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        context.clock.pass_seconds(8)
        return gradients[0], None


class Model(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Any:
        self.clock.pass_seconds(3)
        apply: Any = Delayed.apply
        return apply(inputs * self.weight, self.clock)


class Descent(Optimizer):
    def __init__(self, model: Model) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.clock = model.clock

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a closure
        self.clock.pass_seconds(5)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.sub_(0.1 * weight.grad)


def train(
    clock: Clock,
    batches: Iterable[Tensor],
    net: nn.Module,
    backward: Callable[[Tensor], None],
    step: Callable[[], None],
    function: Callable[[Tensor], Any],
) -> None:
    """The loop of a user, in which everything takes time."""
    for inputs in batches:
        clock.pass_seconds(0.25)
        outputs = function(inputs)
        clock.pass_seconds(0.5)
        backward(outputs.sum())
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        clock.pass_seconds(2)
        step()


def train_as_script(out: Path, clock: Clock, *, calls_module: bool) -> None:
    net = Model(clock)
    optimizer = Descent(net)

    def cleared(batches: Iterable[Tensor]) -> Iterator[Tensor]:
        for batch in batches:
            optimizer.zero_grad()
            yield batch

    with paceline.profile(out=str(out), name="profile"):
        batches = cleared(DataLoader(Samples(clock), BATCH))
        call = net if calls_module else net.forward
        train(clock, batches, net, torch.Tensor.backward, optimizer.step, call)


def train_with_join(out: Path, clock: Clock, *, calls_module: bool) -> None:
    net = Model(clock)
    with paceline.join("single", out=out, name="join") as team:
        loader = DataLoader(Samples(clock), BATCH)
        trained, _, batches = team.prepare(net, Descent(net), loader)
        call = trained if calls_module else net.forward
        train(clock, batches, trained, team.backward, team.step, call)


IN_STEP = {"input": 1.0, "forward": 3.5, "backward": 8.0, "update": 7.125, "other": 0.25}


@pytest.mark.parametrize(
    ("calls_module", "expected"),
    [
        (True, IN_STEP),
        # Without the call of a module, the forward pass begins when the batch is there.
        (False, {**IN_STEP, "forward": 3.75, "other": 0.0}),
    ],
)
def test_the_phases_of_both_are_the_same(
    tmp_path: Path, clock: Clock, calls_module: bool, expected: dict[str, float]
) -> None:
    train_as_script(tmp_path, clock, calls_module=calls_module)
    train_with_join(tmp_path, clock, calls_module=calls_module)
    for name in ("profile", "join"):
        split = run_iteration_breakdown(open_run(tmp_path / name))
        assert split is not None
        seconds = {phase: spent for phase, spent in split.seconds.items() if phase in expected}
        assert seconds == pytest.approx(expected), name
        assert split.total == pytest.approx(sum(expected.values())), name
