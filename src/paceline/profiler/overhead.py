"""What the profiler costs the script, for `measurement_overhead` of the result.

Interpreting what hooks noted is timed while it is done. What the hooks themselves take is too short
to be timed each time. How long noting takes depends on what the script leaves in the caches, so it
is measured again and again while the script runs, by calling one of the functions that note once
more. Other hooks are measured before the script trains. Both are multiplied by the number of calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import nn

from paceline.profiler.tracking.event_queue import Event, Guard
from paceline.profiler.tracking.notes import (
    count_samples,
    measured_backward,
    measured_call,
    measured_clearing,
    measured_input,
    model_notes,
    update_notes,
)
from paceline.profiler.tracking.script_calls import ScriptCalls
from paceline.profiler.tracking.step_tracker import StepTracker

FUNCTIONS, NOTES = 6, 8
"""Of a step: that of input notes two events, and so does that of the backward pass."""
FIRST_PROBES, PROBES_KEPT = 3, 25
"""Of each function."""
REPEATS, CALLS = 25, 40
DISPLACED_BYTES = 4 << 20
"""More than the caches that belong to one core."""


class NoteProbe:
    """Times the functions that note, called once more with an event queue of their own.

    One of them is called twice, a step apart: what the script does in a step has then displaced as
    much of it from the caches as before a real call.
    """

    def __init__(self) -> None:
        recorded, paused = StepTracker(lambda: None), StepTracker(lambda: None)
        paused.begin_pause()
        functions: tuple[Callable[[], object], ...] = (
            # What timing a call takes.
            partial(_nothing, None),
            *_functions_of_step(recorded),
            *_functions_of_step(paused),
        )
        self._seconds = [deque[float](maxlen=PROBES_KEPT) for _ in functions]
        self._next = cycle(zip(functions, self._seconds, strict=True))
        self._function, self._timed = next(self._next)
        self._called_at: int | None = None
        self._medians: list[float] | None = None
        # Until the script trains, and on a GPU, it is what noting takes after other work.
        displaced = torch.zeros(DISPLACED_BYTES, dtype=torch.uint8)
        for _ in range(FIRST_PROBES * len(functions)):
            displaced.add_(1)
            self._time()

    def has_ended(self, updates: int) -> bool:
        """Called at each event until a function was timed; `updates`: the number of steps."""
        if self._called_at is None:
            self._function()
            self._called_at = updates
        elif self._called_at != updates:
            self._time()
            return True
        return False

    def _time(self) -> None:
        began = perf_counter()
        self._function()
        self._timed.append(perf_counter() - began)
        self._function, self._timed = next(self._next)
        self._called_at = None
        self._medians = None

    @property
    def note_seconds(self) -> float:
        """Of an event: a recorded step has `NOTES` of them."""
        return sum(self._of_functions()[:FUNCTIONS]) / NOTES

    @property
    def paused_seconds(self) -> float:
        """Of a step that is not recorded."""
        return sum(self._of_functions()[FUNCTIONS:])

    def _of_functions(self) -> list[float]:
        if self._medians is None:
            nothing, *others = map(median, self._seconds)
            self._medians = [max(0.0, each - nothing) for each in others]
        return self._medians


def _functions_of_step(tracker: StepTracker) -> tuple[Callable[[], object], ...]:
    """Those that note, each called as in a step."""
    tracker.events.append = deque[Event](maxlen=PROBES_KEPT).append
    begin, end = update_notes(tracker)
    optimizer, batches, batch = _Object(), _Object(), [torch.zeros(1)]
    tracker.paused.optimizer = ref(optimizer)
    get_batch = measured_input(lambda _: batch, tracker, count_samples)
    run_backward = measured_backward(_nothing, tracker, [])
    clear_gradients = measured_clearing(_nothing, tracker)
    note_call = model_notes(tracker)
    return (
        partial(get_batch, batches),
        partial(note_call, nn.Identity()),
        # Reading the loss is timed elsewhere.
        partial(run_backward, (), accumulate_grad=False),
        partial(begin, optimizer),
        partial(end, optimizer),
        partial(clear_gradients, optimizer),
    )


@dataclass
class HookCosts:
    """What each call costs on this machine."""

    call_seconds: float = 0.0
    """Of the call of a module inside a model."""
    timed_seconds: float = 0.0
    """Of a timed call, such as a read-back."""
    skipped_seconds: float = 0.0
    """Of a read-back that is not timed."""
    probe: NoteProbe = field(default_factory=NoteProbe)

    def seconds(self, tracker: StepTracker) -> float:
        """Estimate the time that the profiler took the script so far, on the host."""
        calls = tracker.timed_calls * self.timed_seconds
        skipped = tracker.skipped_calls * self.skipped_seconds
        return self.recording_seconds(tracker) + calls + skipped + tracker.events.seconds

    def recording_seconds(self, tracker: StepTracker) -> float:
        """The part of it that pauses in recording reduce."""
        # A step that is not recorded is an event, too.
        noted = (tracker.events.noted - tracker.paused_steps) * self.probe.note_seconds
        noted += tracker.paused_steps * self.probe.paused_seconds + tracker.loss_seconds
        modules = tracker.module_calls * self.call_seconds
        return noted + modules + tracker.recorder_seconds


class _Object:
    """In place of an optimizer or an iterator."""

    _dataset = None


class _Module:
    _compiled_call_impl = None

    @staticmethod
    def _call_impl() -> None:
        pass


def measure_hook_costs(guard: Guard) -> HookCosts:
    tracker = StepTracker(lambda: None, guard=guard)
    tracker.clock.enter("forward")
    nothing = _seconds(lambda: _nothing(None))
    timed, skipped = (
        max(0.0, _seconds(each) - nothing)
        for each in (_timed_read_back(tracker, guard), _skipped_read_back(tracker, guard))
    )
    return HookCosts(_call_seconds(tracker), timed, skipped)


def _seconds(function: Callable[[], object]) -> float:
    """The median: other processes may take the core during a call."""
    seconds = []
    for _ in range(REPEATS):
        began = perf_counter()
        for _ in range(CALLS):
            function()
        seconds.append((perf_counter() - began) / CALLS)
    return median(seconds)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _call_seconds(tracker: StepTracker) -> float:
    original: Any = nn.Module._wrapped_call_impl
    call = measured_call(original, tracker.events, _nothing)
    tracker.events.is_in_model = True
    return max(0.0, _seconds(lambda: call(_Module)) - _seconds(lambda: original(_Module)))


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
