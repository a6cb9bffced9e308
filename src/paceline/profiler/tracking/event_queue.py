"""What hooks noted, until it is interpreted.

A hook runs between two parts of the program, when little of its own code is in the caches of the
processor, and takes about four times as long as in a loop. On a CPU, hooks therefore only append an
event, and the events of many steps are interpreted at once (docs/design-notes.md). All ranks do
that after the same step, since a rank that does it alone keeps the others waiting.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter, thread_time
from typing import Any

FIRST_INTERVAL_SECONDS, INTERVAL_SECONDS, INTERVAL_SHARE = 0.5, 1.0, 0.05
"""About how long events wait: a share of the time since the first step, within these limits, since
a short run is known by few intervals. If no step ends, they wait twice as long."""

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a function that never raises: after an exception, the profiler stops."""

Event = tuple[Any, ...]
"""The time, the function that interprets it, and its arguments."""


def _nothing(*_: Event) -> None:
    pass


class EventQueue:
    """Interprets each event at once until `defer`, and none after `stop`."""

    __slots__ = (
        "_deferred",
        "_is_flushing",
        "_last",
        "_now",
        "_waiting",
        "append",
        "due",
        "due_update",
        "flush",
        "flush_all",
        "flush_due",
        "interval",
        "is_deferred",
        "is_in_model",
        "is_ready",
        "noted",
        "noted_thread",
        "on_flush",
        "on_window",
        "seconds",
        "thread",
        "updates",
        "window_ends",
    )

    def __init__(self, guard: Guard) -> None:
        self.flush = guard(self._flush)
        """Interprets the events that wait, if this is the thread that trains."""
        self.flush_all = guard(self._flush_all)
        """The same at the end, in any thread."""
        self.append: Callable[[Event], None] = guard(self._interpret_now)
        self.thread = self.noted_thread = get_ident()
        """The one that trains, and whose calls hooks note: none in a pause, and after `stop`."""
        self.is_deferred = False
        """Whether events wait."""
        self.on_flush: Callable[[], object] = lambda: None
        """Called when those that waited are interpreted."""
        self.is_in_model = False
        """Whether the last event was the call of a model for training: those of its modules need
        none."""
        self.updates = 0
        """Steps of all optimizers."""
        self.window_ends = sys.maxsize
        """How many of them there are when `on_window` is called, after the last one."""
        self.on_window: Callable[[], object] = lambda: None
        self.noted = 0
        """How many events were interpreted."""
        self.seconds = 0.0
        """What that took: CPU time, or on a GPU, where it is done for each event, time."""
        self.due_update = sys.maxsize
        """How many steps of optimizers there are when those that wait are interpreted."""
        self.due = math.inf
        """When they are interpreted in any case."""
        self.flush_due = guard(self._flush_due)
        """Called when they are due."""
        self.is_ready: Callable[[], bool] = lambda: True
        """Called then: whether they are interpreted now, not at one of the next events."""
        self.interval = FIRST_INTERVAL_SECONDS
        """Seconds that events wait at present."""
        self._deferred = 0.0
        """Since when they do."""
        self._waiting: list[Event] = []
        self._is_flushing = False
        self._last = 0, perf_counter()
        """How many steps there were when events were interpreted last, and when that was."""
        self._now = 0.0

    def defer(self) -> None:
        """Let events wait: their times are those of the program, not of a GPU."""
        self.append, self.is_deferred = self._waiting.append, True
        self._deferred = perf_counter()
        self._schedule()

    def stop(self) -> None:
        """Ignore events from now on: hooks of torch may outlast the session."""
        self._waiting.clear()
        self.append, self.window_ends = _nothing, sys.maxsize
        self.follow(0)

    def follow(self, thread: int) -> None:
        """Note what a thread does: it is the one that trains."""
        self.thread = self.noted_thread = thread

    def time(self) -> float:
        """The time of the event that is being interpreted; otherwise, now."""
        return self._now or perf_counter()

    def advance(self, moment: float) -> None:
        """Go on to the end of the event that is being interpreted, if it has one of its own."""
        self._now = moment

    def _flush(self) -> None:
        # Another thread, such as one that saves a checkpoint, must not interpret what this notes.
        if get_ident() == self.thread:
            self._flush_all()

    def _flush_all(self) -> None:
        # Whatever reads the clock meanwhile needs what is interpreted, not what follows.
        if not self._waiting or self._is_flushing:
            return
        self._is_flushing = True
        try:
            waiting = self._waiting.copy()
            del self._waiting[: len(waiting)]
            began = thread_time()
            self._interpret(waiting)
            self.on_flush()
            self.seconds += thread_time() - began
            self._schedule()
        finally:
            self._is_flushing = False

    def _schedule(self) -> None:
        """Choose the step after which events are interpreted.

        It is a multiple of a power of two, so ranks whose steps take about as long choose the same.
        """
        (steps, then), now = self._last, perf_counter()
        self._last = self.updates, now
        share = INTERVAL_SHARE * (now - self._deferred)
        self.interval = min(max(share, FIRST_INTERVAL_SECONDS), INTERVAL_SECONDS)
        self.due = now + 2 * self.interval
        period = 1
        if self.updates > steps and now > then:
            fitting = self.interval * (self.updates - steps) / (now - then)
            period = 1 << max(0, round(math.log2(fitting)))
        self.due_update = (self.updates // period + 1) * period

    def _flush_due(self) -> None:
        if self.is_ready() or perf_counter() >= self.due:
            self._flush()

    def _interpret_now(self, event: Event) -> None:
        # Reading the CPU time would take as long as the rest.
        began = perf_counter()
        self._interpret((event,))
        self.seconds += perf_counter() - began

    def _interpret(self, events: Sequence[Event]) -> None:
        try:
            for self._now, function, *arguments in events:
                function(*arguments)
        finally:
            self._now = 0.0
            self.noted += len(events)
