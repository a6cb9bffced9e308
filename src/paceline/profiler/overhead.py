"""What the profiler costs the script, for `measurement_overhead` of the result."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.profiler.hooks import Guard, measured_call
from paceline.profiler.script_calls import ScriptCalls
from paceline.profiler.step_tracker import StepTracker

BLOCKS, REPEATS = 5, 40
"""Take a few milliseconds."""


class HookCosts(NamedTuple):
    """Measured on this machine before the script trains."""

    change_seconds: float = 0.0
    """Of a phase change, with the hook that makes it."""
    call_seconds: float = 0.0
    """Of the call of a module inside a model."""
    timed_seconds: float = 0.0
    """Of a timed call, such as a read-back."""
    skipped_seconds: float = 0.0
    """Of a read-back that is not timed."""

    def seconds(self, tracker: StepTracker) -> float:
        """Estimate the time that all hooks so far took the script."""
        changes = tracker.clock.switches * self.change_seconds
        modules = tracker.module_calls * self.call_seconds
        calls = tracker.timed_calls * self.timed_seconds
        skipped = tracker.skipped_calls * self.skipped_seconds
        return changes + modules + calls + skipped + tracker.recorder_seconds


class _Optimizer:
    param_groups = ({"params": (), "lr": 0.0},)


def measure_hook_costs(guard: Guard) -> HookCosts:
    tracker = StepTracker(lambda: None)
    step = _step_of_hooks(tracker, guard)
    seconds = _seconds(step)
    change_seconds = BLOCKS * REPEATS * seconds / tracker.clock.switches
    nothing = _seconds(lambda: _nothing(None, None))
    others = (_call(tracker), _timed_read_back(tracker, guard), _skipped_read_back(tracker, guard))
    return HookCosts(change_seconds, *(max(0.0, _seconds(each) - nothing) for each in others))


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


def _timed_read_back(tracker: StepTracker, guard: Guard) -> Callable[[], object]:
    read_back = ScriptCalls(tracker).read_back("", guard)(_nothing)
    # Calls from lines of paceline are not timed.
    call = eval(compile("lambda: call(None)", "script", "eval"), {"call": read_back})

    def step() -> None:
        # The first calls of a step are timed.
        tracker.steps += 1
        call()

    return step


def _skipped_read_back(tracker: StepTracker, guard: Guard) -> Callable[[], object]:
    call = ScriptCalls(tracker).read_back("", guard)(_nothing)
    return lambda: call(None)
