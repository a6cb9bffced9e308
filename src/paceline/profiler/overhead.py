"""What the profiler costs the script, for `measurement_overhead` of the result."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.profiler.hooks import Guard, measured_call
from paceline.profiler.step_tracker import StepTracker

BLOCKS, REPEATS = 5, 40
"""Take a few milliseconds."""


class HookCosts(NamedTuple):
    """Measured on this machine before the script trains."""

    change_seconds: float = 0.0
    """Of a phase change, with the hook that makes it."""
    call_seconds: float = 0.0
    """Of the call of a module inside a model."""

    def seconds(self, tracker: StepTracker) -> float:
        """Estimate the time that all hooks so far took the script."""
        changes = tracker.clock.switches * self.change_seconds
        return changes + tracker.module_calls * self.call_seconds + tracker.recorder_seconds


class _Optimizer:
    param_groups = ({"params": (), "lr": 0.0},)


def measure_hook_costs(guard: Guard) -> HookCosts:
    tracker = StepTracker(lambda: None)
    step = _step_of_hooks(tracker, guard)
    seconds = _seconds(step)
    return HookCosts(
        change_seconds=BLOCKS * REPEATS * seconds / tracker.clock.switches,
        call_seconds=max(0.0, _seconds(_call(tracker)) - _seconds(lambda: _nothing(None, None))),
    )


def _seconds(function: Callable[[], object]) -> float:
    """The median over blocks: other processes may take the core during one of them."""
    blocks = []
    for _ in range(BLOCKS):
        began = perf_counter()
        for _ in range(REPEATS):
            function()
        blocks.append((perf_counter() - began) / REPEATS)
    return median(blocks)


def _step_of_hooks(tracker: StepTracker, guard: Guard) -> Callable[[], None]:
    begin_input, end_input = guard(tracker.begin_input), guard(tracker.end_input)
    begin_backward, end_backward = guard(tracker.begin_backward), guard(tracker.end_backward)
    begin_update, end_update = guard(tracker.begin_update), guard(tracker.end_update)
    call_model, model, optimizer = guard(tracker.call_model), nn.Identity(), _Optimizer()
    loss, batch = torch.zeros(()), (torch.zeros(1),)

    def step() -> None:
        begin_input(tracker)
        end_input(tracker, batch)
        call_model(model)
        end_backward(begin_backward((loss,), True))
        begin_update(optimizer)
        end_update(optimizer)

    return step


def _nothing(*_: Any) -> None:
    pass


def _call(tracker: StepTracker) -> Callable[[], None]:
    call = measured_call(_nothing, tracker, _nothing)
    tracker.clock.enter("forward")
    return lambda: call(None, None)
