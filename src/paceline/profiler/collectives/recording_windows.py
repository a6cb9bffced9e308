"""Records what DDP issues only in some windows of steps, if recording all of it costs too much.

A kernel in Python and its record take about 0.1 ms, which is much of a step of a few milliseconds.
Steps are counted in windows, and of `factor` windows about one is recorded. All factors are powers
of two, so ranks that choose different ones share windows, and nothing is communicated. Which ones
are recorded is irregular, because programs do things at regular intervals.

In a pause, kernels are disabled. Process groups themselves count their collectives, so each record
still has the number that all ranks know it by. Only the C++ code of DDP issues collectives then,
which are alike in all steps: a call of the script ends the pause before it is issued
(`CollectiveRecorder.before_call`). Communication that blocks the program is part of other phases:
the share that it had in the last recorded window is moved out of them. What is in progress when
training stops is read from PyTorch's flight recorder.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

from paceline.profiler import FACTOR_VARIABLE
from paceline.profiler.collectives.flight_recorder import number_of
from paceline.profiler.collectives.paused_calls import PausedCalls, are_traced
from paceline.profiler.collectives.sleep_time import SleepTime

if TYPE_CHECKING:
    from paceline.profiler.collectives.recorder import CollectiveRecorder
    from paceline.profiler.tracking.step_tracker import StepTracker

WINDOW_STEPS = 16
FIRST_STEPS, FIRST_SECONDS = 64, 1.0
"""All steps before this are recorded."""

TARGET = 0.0025
"""What recording may cost, as a share of the time."""
MAX_FACTOR = 32

BLOCKED_PHASES = ("forward", "backward")
"""Phases in which DDP blocks the program: for its buffers and gradients."""

STALL_FACTOR, STALL_SECONDS = 4.0, 0.05
"""What a backward pass takes beyond this multiple of what is usual, and beyond this time, is
waiting as far as the thread slept: for a rank that evaluates or saves a checkpoint meanwhile. The
rest is a longer computation."""


@dataclass(slots=True)
class CommunicationShare:
    """What communication is of a phase in which it blocks the program."""

    phase: str
    share: float
    """Of the phase, with the communication in it."""
    usual_seconds: float
    """Of the phase in one step; `STALL_FACTOR` times."""
    seconds: float
    """The total of the phase, up to the last step."""


@dataclass(slots=True)
class _Totals:
    """When a window began."""

    updates: int
    steps: int
    moment: float
    recorder_seconds: float
    script_calls: int
    other_records: int
    phases: dict[str, float]
    exposed: dict[str, float]


def is_recorded(index: int, factor: int) -> bool:
    """Whether a window is recorded: of `factor`, about one, and so by all smaller factors."""
    # The finalizer of SplitMix64: all bits of the hash depend on all bits of the index.
    mask = 0xFFFFFFFFFFFFFFFF
    value = index * 0x9E3779B97F4A7C15 & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return (value ^ value >> 31) % factor == 0


class RecordingWindows:
    """Pauses and resumes a recorder at the ends of optimizer steps, on the training thread."""

    def __init__(self, recorder: CollectiveRecorder, tracker: StepTracker) -> None:
        self._recorder, self._tracker = recorder, tracker
        forced = os.environ.get(FACTOR_VARIABLE)
        self._forced = int(forced) if forced else None
        self._factor = 1
        self._is_possible: bool | None = None
        """Whether the flight recorder agrees with the log; None before it was compared."""
        self._window: _Totals | None = None
        self._began = 0.0
        self._shares: list[CommunicationShare] = []
        self._sleep_time = SleepTime()
        self._paused_calls: PausedCalls | None = None
        self._is_paused = False
        self._must_resume = False
        """Whether steps in a pause may not be like those of the window before it."""
        tracker.events.on_window = recorder.guard(self._end_window)
        tracker.events.window_ends = WINDOW_STEPS
        recorder.before_call = recorder.guard(self._interrupt)

    def end_step(self) -> None:
        """Move the communication of a step that was not recorded out of the phases it is in."""
        if not self._is_paused:
            return
        clock = self._tracker.clock
        self._sleep_time.refresh()
        for one in self._shares:
            spent = clock.known_seconds[one.phase] - one.seconds
            excess = waited = 0.0
            if one.phase == "backward":
                # A forward pass contains code of the script.
                excess = max(0.0, spent - max(one.usual_seconds, STALL_SECONDS))
            if excess:
                waited = self._sleep_time.take(excess)
            exposed = one.share * (spent - excess)
            clock.move(one.phase, "exchange", exposed)
            clock.move(one.phase, "wait", waited)
            one.seconds += spent - exposed - waited
            if excess:
                # Perhaps steps are longer from now on.
                self._must_resume, self._tracker.events.window_ends = True, 0

    def close(self, has_failed: bool) -> None:
        """The process ends, or is not measured any more."""
        self._tracker.events.window_ends = sys.maxsize
        self.remove(has_failed=has_failed)
        if self._is_paused:
            self._describe("resume", self._totals())
            self._is_paused = False

    def remove(self, *, has_failed: bool = False) -> None:
        """Stop the thread, before the log is closed."""
        if self._paused_calls is not None:
            self._paused_calls.remove(has_failed=has_failed)

    def _end_window(self) -> None:
        tracker = self._tracker
        if not tracker.is_in_thread():
            return
        if self._recorder.log is None:
            # There are no collectives: what the script does is not interpreted just for this.
            tracker.events.window_ends += FIRST_STEPS
            return
        now = self._totals()
        if not self._began:
            self._began = now.moment
            # Which thread trains is known since the first step.
            self._recorder.calls_of_other_threads = 0
        if not self._is_paused:
            self._factor = self._next_factor(now)
        index = now.updates // WINDOW_STEPS
        if self._must_resume or is_recorded(index, self._factor):
            self._resume()
            # A whole window, also if it is not the end of one.
            self._window, index = now, index + (2 if self._must_resume else 1)
            self._must_resume = False
        else:
            if not self._is_paused:
                self._pause(now)
            while not is_recorded(index, self._factor):
                index += 1
        tracker.events.window_ends = index * WINDOW_STEPS

    def _totals(self) -> _Totals:
        tracker = self._tracker
        phases = dict(tracker.clock.known_seconds)
        return _Totals(
            tracker.events.updates,
            tracker.steps,
            perf_counter(),
            tracker.recorder_seconds,
            self._recorder.script_calls,
            self._recorder.other_records,
            phases,
            dict(tracker.exposed_seconds),
        )

    def _next_factor(self, now: _Totals) -> int:
        """The factor from now on, by what recording cost in the window that ends now."""
        window = self._window
        if window is None or not self._can_pause(window, now):
            return 1
        if self._forced is not None:
            return self._forced
        share = (now.recorder_seconds - window.recorder_seconds) / (now.moment - window.moment)
        factor = 1
        while share > factor * TARGET and factor < MAX_FACTOR:
            factor *= 2
        # One window is a small sample: later on, the factor changes by one power of two at most.
        return (
            factor if self._factor == 1 else min(max(factor, self._factor // 2), self._factor * 2)
        )

    def _can_pause(self, window: _Totals, now: _Totals) -> bool:
        recorder = self._recorder
        calls = now.script_calls - window.script_calls
        if now.other_records - window.other_records > calls:
            # C++ code issues others than those of DDP, which would not end a pause.
            recorder.can_pause = False
        # With several optimizers, their updates are not steps.
        are_steps = now.updates - window.updates == now.steps - window.steps
        if calls or not are_steps:
            return False
        is_first = self._forced is None and (
            now.updates < FIRST_STEPS or now.moment - self._began < FIRST_SECONDS
        )
        # Kernels must not be disabled while another thread is in one.
        can_pause = recorder.can_pause and not recorder.calls_of_other_threads
        if is_first or recorder.log is None or not can_pause:
            return False
        numbers = self._numbers()
        for known in recorder.groups.values():
            if known.index in numbers and numbers[known.index] != known.calls():
                recorder.can_pause = False
                return False
        if self._is_possible is None:
            self._is_possible = are_traced(recorder.log, recorder.groups)
        return self._is_possible

    def _numbers(self) -> dict[int, int]:
        """How many collectives each group was called for since its first record."""
        found = {}
        # A copy, because another thread calls this, too.
        for group in list(distributed_c10d._world.pg_map):
            known = self._recorder.groups.get(group.group_name)
            number = number_of(group) if known is not None else None
            if known is not None and number is not None:
                found[known.index] = number - known.calls_before
        return found

    def _pause(self, now: _Totals) -> None:
        began = perf_counter()
        window, log = self._window, self._recorder.log
        assert window is not None
        assert log is not None
        self._recorder.end_step()
        self._recorder.kernels.disable()
        steps = now.updates - window.updates
        self._shares = []
        for phase in BLOCKED_PHASES:
            seconds = now.exposed.get(phase, 0.0) - window.exposed.get(phase, 0.0)
            rest = max(0.0, now.phases[phase] - window.phases[phase])
            if seconds > 0:
                usual = STALL_FACTOR * (rest + seconds) / steps
                share = seconds / (rest + seconds)
                self._shares.append(CommunicationShare(phase, share, usual, now.phases[phase]))
        self._describe(
            "pause",
            now,
            window_began=window.moment,
            window_updates=window.updates,
            exchange=window.phases["exchange"],
        )
        if self._paused_calls is None:
            self._paused_calls = PausedCalls(
                log, self._tracker, self._recorder.guard, self._numbers
            )
        step_seconds = (now.moment - window.moment) / steps
        self._paused_calls.begin(dict(self._recorder.groups), step_seconds)
        self._is_paused, self._sleep_time = True, SleepTime()
        self._tracker.recorder_seconds += perf_counter() - began

    def _interrupt(self) -> None:
        """The script is about to issue a collective, or changes what groups or models there are."""
        if not self._is_paused:
            return
        if not self._tracker.is_in_thread():
            # It is not recorded, but those after the next step are.
            self._recorder.can_pause, self._must_resume = False, True
            self._tracker.events.window_ends = 0
            return
        self._resume()
        # The next window begins with a step.
        self._window = None
        index = self._tracker.events.updates // WINDOW_STEPS
        self._tracker.events.window_ends = (index + 1) * WINDOW_STEPS

    def _resume(self) -> None:
        if not self._is_paused or self._paused_calls is None:
            return
        # The steps that are not interpreted yet are part of the pause, as is what precedes a call.
        now = self._totals()
        self.end_step()
        self._paused_calls.end()
        self._is_paused = False
        numbers = self._numbers()
        for known in self._recorder.groups.values():
            if known.index in numbers:
                known.continue_at(numbers[known.index])
        self._describe("resume", now)
        self._recorder.kernels.enable()
        self._tracker.recorder_seconds += perf_counter() - now.moment

    def _describe(self, event: str, now: _Totals, **values: float) -> None:
        log = self._recorder.log
        if log is not None:
            numbers = {str(index): number for index, number in self._numbers().items()}
            log.describe(event, updates=now.updates, moment=now.moment, calls=numbers, **values)
