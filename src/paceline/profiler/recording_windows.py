"""Records only some windows of steps if recording all of them costs too much.

What happens in a step of a CPU is noted by hooks, about 5 us each, and a kernel in Python and its
record take about 0.1 ms for each collective: much of a step of a few milliseconds. Steps are
counted in windows, and of `factor` windows about one is recorded. All factors are powers of two, so
ranks that choose different ones share windows, and nothing is communicated. Which ones are recorded
is irregular, because programs do things at regular intervals.

In a pause, the ends of steps, input and backward passes are still timed, and the rest is divided
among the phases as in the last recorded window (tracking/paused_steps.py). Whatever is not part of
usual steps ends a pause before it happens: evaluation, a checkpoint, another dataset, a collective
that the script calls.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.profiler import FACTOR_VARIABLE
from paceline.profiler.sleep_time import SleepTime
from paceline.profiler.tracking.event_queue import Guard
from paceline.profiler.tracking.paused_steps import Noted, StepPhases, UsualStep, steps_between

if TYPE_CHECKING:
    from paceline.profiler.collectives.pauses import CollectivePauses, Counted
    from paceline.profiler.overhead import HookCosts
    from paceline.profiler.tracking.step_tracker import StepTracker

WINDOW_STEPS = 16
FIRST_STEPS, FIRST_SECONDS = 64, 1.0
"""All steps before this are recorded."""

NEGLIGIBLE, TARGET = 0.003, 0.0015
"""What recording may cost, as a share of the time: if it is more than the first, at most the
second. The steps of a pause cost something, too."""
MAX_FACTOR = 64
MAX_DELAY = 64
"""Windows that are recorded after pauses that ended at once, before the next one is tried."""

STALL_SECONDS = 0.05
"""If a long step takes more than this, recording resumes. What its backward pass takes beyond the
usual is waiting as far as the thread slept: for a rank that evaluates or saves a checkpoint."""


@dataclass(slots=True)
class Totals:
    """Up to the beginning or the end of a window."""

    updates: int
    steps: int
    moment: float
    recording_seconds: float
    module_calls: int
    phases: StepPhases
    collectives: Counted | None


def is_recorded(index: int, factor: int) -> bool:
    """Whether a window is recorded: of `factor`, about one, and so by all smaller factors."""
    # The finalizer of SplitMix64: all bits of the hash depend on all bits of the index.
    mask = 0xFFFFFFFFFFFFFFFF
    value = index * 0x9E3779B97F4A7C15 & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return (value ^ value >> 31) % factor == 0


class RecordingWindows:
    """Pauses and resumes recording at the ends of optimizer steps, on the training thread."""

    def __init__(
        self,
        tracker: StepTracker,
        costs: HookCosts,
        guard: Guard,
        collectives: CollectivePauses | None = None,
    ) -> None:
        self._tracker, self._costs, self._collectives = tracker, costs, collectives
        forced = os.environ.get(FACTOR_VARIABLE)
        self._forced = int(forced) if forced else None
        self._factor = 1
        self._window: Totals | None = None
        self._began = 0.0
        self._pause: Totals | None = None
        """When the pause began."""
        self._usual = UsualStep(0.0, 0.0, 0.0, 0.0, {})
        self._modules_per_step = 0.0
        self._steps_divided = 0
        self._sleep_time = SleepTime()
        self._must_resume = False
        """Whether steps in a pause may not be like those of the window before it."""
        self._delay = 0
        """Windows to record before the next pause."""
        self._next_delay = 1
        tracker.events.on_window = guard(self._end_window)
        tracker.events.window_ends = WINDOW_STEPS
        tracker.paused.interrupt = guard(self._interrupt)
        self.before_call = guard(self._interrupt_for_call)
        """Called before the script issues a collective, or changes which ones there are."""

    @property
    def is_paused(self) -> bool:
        return self._pause is not None

    def settle(self) -> None:
        """Divide the time of the pause so far among the phases."""
        if self._pause is None:
            return
        tracker, clock = self._tracker, self._tracker.clock
        self._sleep_time.refresh()
        clock.enter("other")
        noted, steps = tracker.take_paused(), tracker.steps - self._steps_divided
        step_seconds = clock.step_seconds[-steps:].tolist() if steps else []
        # An unfinished step is not divided: it may contain anything.
        self._usual.divide(clock, step_seconds, noted, self._waited(step_seconds, noted))
        tracker.module_calls += round(self._modules_per_step * steps)
        tracker.paused_steps += steps
        self._steps_divided = tracker.steps

    def _waited(self, step_seconds: Sequence[float], noted: Noted) -> float:
        """How long the program waited for other ranks in steps that took much longer than usual."""
        usual = self._usual
        steps = list(zip(step_seconds, noted.steps, strict=True))
        stalls = [
            usual.more_backward(step)
            for seconds, step in steps
            if seconds > STALL_SECONDS and usual.is_long(seconds)
        ]
        if not stalls:
            return 0.0
        # Perhaps steps are longer from now on.
        self._resume_later()
        backward = math.fsum(stalls)
        if not backward or self._collectives is None or not self._collectives.has_groups:
            return 0.0
        # The thread also slept as usual, and perhaps in what is not part of usual steps.
        slept = usual.exchange_share * usual.backward_seconds * len(steps)
        slept += math.fsum(usual.unusual(seconds, step) for seconds, step in steps)
        return self._sleep_time.take(backward, slept)

    def close(self, has_failed: bool) -> None:
        """The process ends, or is not measured any more."""
        self._tracker.events.window_ends = sys.maxsize
        self.remove(has_failed=has_failed)
        if self._pause is not None:
            self.settle()
            if self._collectives is not None:
                self._collectives.describe_end(self._tracker.events.updates, perf_counter())
            self._tracker.end_pause()
            self._pause = None

    def remove(self, *, has_failed: bool = False) -> None:
        """Stop the thread of the collectives, before their log is closed."""
        if self._collectives is not None:
            self._collectives.remove(has_failed=has_failed)

    def _end_window(self) -> None:
        tracker = self._tracker
        if not tracker.is_in_thread():
            return
        if not self._began:
            self._began = perf_counter()
            if self._collectives is not None:
                self._collectives.begin()
        now = None if self.is_paused else self._totals()
        if now is not None:
            self._factor = self._next_factor(now)
        index = tracker.events.updates // WINDOW_STEPS
        if self._must_resume or is_recorded(index, self._factor):
            self._resume()
            # A whole window, also if it is not the end of one.
            self._window, index = now or self._totals(), index + (2 if self._must_resume else 1)
            self._must_resume = False
        else:
            if now is not None:
                self._begin_pause(now)
            while not is_recorded(index, self._factor):
                index += 1
        tracker.events.window_ends = index * WINDOW_STEPS

    def _totals(self) -> Totals:
        tracker = self._tracker
        # All that was noted is interpreted first.
        tracker.events.flush()
        return Totals(
            tracker.events.updates,
            tracker.steps,
            perf_counter(),
            self._costs.recording_seconds(tracker),
            tracker.module_calls,
            tracker.phases_so_far(),
            self._collectives.counted() if self._collectives is not None else None,
        )

    def _next_factor(self, now: Totals) -> int:
        """The factor from now on, by what recording cost in the window that ends now."""
        window = self._window
        if window is None or not self._can_pause(window, now):
            return 1
        if self._delay:
            self._delay -= 1
            return 1
        if self._forced is not None:
            return self._forced
        recording = now.recording_seconds - window.recording_seconds
        share = recording / (now.moment - window.moment)
        factor = 1
        if share > NEGLIGIBLE:
            while share > factor * TARGET and factor < MAX_FACTOR:
                factor *= 2
        # One window is a small sample: later on, the factor changes by one power of two at most.
        return (
            factor if self._factor == 1 else min(max(factor, self._factor // 2), self._factor * 2)
        )

    def _can_pause(self, window: Totals, now: Totals) -> bool:
        # With several optimizers, their updates are not steps.
        if now.updates - window.updates != now.steps - window.steps:
            return False
        is_first = self._forced is None and (
            now.updates < FIRST_STEPS or now.moment - self._began < FIRST_SECONDS
        )
        if is_first or not self._tracker.can_pause:
            return False
        if self._collectives is None or window.collectives is None:
            return True
        return self._collectives.can_pause(window.collectives)

    def _begin_pause(self, now: Totals) -> None:
        began, window, tracker = perf_counter(), self._window, self._tracker
        assert window is not None
        steps = now.updates - window.updates
        recorded = islice(tracker.last_steps, len(tracker.last_steps) - steps, None)
        self._usual = UsualStep.of(steps_between([window.phases, *recorded]))
        self._modules_per_step = (now.module_calls - window.module_calls) / steps
        self._steps_divided = now.steps
        if self._collectives is not None:
            self._collectives.pause(
                now.updates,
                now.moment,
                self._usual.seconds,
                window_updates=window.updates,
                window_began=window.moment,
                exchange=window.phases.seconds["exchange"],
            )
        self._sleep_time = SleepTime()
        self._pause = now
        tracker.begin_pause()
        tracker.recorder_seconds += perf_counter() - began

    def _interrupt_for_call(self) -> None:
        if self._pause is None:
            return
        if not self._tracker.is_in_thread():
            # This call is not recorded, but those after the next step are.
            if self._collectives is not None:
                self._collectives.forbid()
            self._resume_later()
        else:
            self._end_pause(self._pause)

    def _interrupt(self) -> None:
        """The script does what is not part of usual steps."""
        paused = self._tracker.paused
        if self._pause is None or not self._tracker.is_in_thread():
            return
        if paused.is_in_input or paused.is_in_backward:
            # Input and backward passes contain whatever happens in them.
            self._resume_later()
        else:
            self._end_pause(self._pause)

    def _resume_later(self) -> None:
        """Resume with the next step."""
        self._must_resume, self._tracker.events.window_ends = True, 0

    def _end_pause(self, pause: Totals) -> None:
        events = self._tracker.events
        self._resume()
        if events.updates - pause.updates >= WINDOW_STEPS:
            self._next_delay = 1
        else:
            # What ended it is in most steps.
            self._delay, self._next_delay = self._next_delay, min(MAX_DELAY, 2 * self._next_delay)
        # The next window begins with a step.
        self._window = None
        events.window_ends = (events.updates // WINDOW_STEPS + 1) * WINDOW_STEPS

    def _resume(self) -> None:
        if self._pause is None:
            return
        tracker, began = self._tracker, perf_counter()
        # The steps that are not interpreted yet are part of the pause, as is what precedes a call.
        self.settle()
        if self._collectives is not None:
            self._collectives.resume(tracker.events.updates, began)
        self._pause = None
        tracker.end_pause()
        tracker.recorder_seconds += perf_counter() - began
