"""What the profiler costs the script, for `measurement_overhead` of the result.

Interpreting what hooks noted is timed while it is done. What the hooks themselves take is too short
to be timed each time: it is measured once, and multiplied by the number of calls.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from paceline.profiler.tracking.event_queue import Guard
from paceline.profiler.tracking.notes import measured_call, update_notes
from paceline.profiler.tracking.script_calls import ScriptCalls
from paceline.profiler.tracking.step_tracker import StepTracker

REPEATS = 25
DISPLACED_BYTES = 4 << 20
"""More than the caches that belong to one core."""


class HookCosts(NamedTuple):
    """Measured on this machine before the script trains."""

    note_seconds: float = 0.0
    """Of noting an event."""
    call_seconds: float = 0.0
    """Of the call of a module inside a model."""
    timed_seconds: float = 0.0
    """Of a timed call, such as a read-back."""
    skipped_seconds: float = 0.0
    """Of a read-back that is not timed."""

    def seconds(self, tracker: StepTracker) -> float:
        """Estimate the time that the profiler took the script so far."""
        noted = tracker.events.noted * self.note_seconds + tracker.events.seconds
        modules = tracker.module_calls * self.call_seconds
        calls = tracker.timed_calls * self.timed_seconds
        skipped = tracker.skipped_calls * self.skipped_seconds
        return noted + modules + calls + skipped + tracker.recorder_seconds


class _Optimizer:
    param_groups = ({"params": (), "lr": 0.0},)


def measure_hook_costs(guard: Guard) -> HookCosts:
    tracker = StepTracker(lambda: None, guard=guard)
    # Interpreting is timed elsewhere.
    tracker.events.defer()
    note, _ = update_notes(tracker)
    optimizer = _Optimizer()
    note_seconds = _seconds(lambda: note(optimizer), has_cold_caches=True)
    tracker.clock.enter("forward")
    nothing = _seconds(lambda: _nothing(None, None))
    others = (_call(tracker), _timed_read_back(tracker, guard), _skipped_read_back(tracker, guard))
    return HookCosts(note_seconds, *(max(0.0, _seconds(each) - nothing) for each in others))


def _seconds(function: Callable[[], object], *, has_cold_caches: bool = False) -> float:
    """The median: other processes may take the core during a call.

    With cold caches: the program ran since the last call.
    """
    displaced = torch.zeros(DISPLACED_BYTES if has_cold_caches else 0, dtype=torch.uint8)
    calls = 1 if has_cold_caches else 40
    seconds = []
    for _ in range(REPEATS):
        displaced.add_(1)
        began = perf_counter()
        for _ in range(calls):
            function()
        seconds.append((perf_counter() - began) / calls)
    return median(seconds)


def _nothing(*_: Any) -> None:
    pass


def _call(tracker: StepTracker) -> Callable[[], None]:
    call = measured_call(_nothing, tracker.events, _nothing)
    tracker.events.is_in_model = True
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
