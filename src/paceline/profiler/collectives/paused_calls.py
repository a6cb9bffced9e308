"""Collectives in progress while recording is paused, for a post-mortem.

A thread notices that no step ends, and adds what the flight recorder has to the log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.profiler.collectives.flight_recorder import TracedCall, read_calls
from paceline.profiler.collectives.log import POLLED, TRACED, CollectiveLog, Counts
from paceline.profiler.tracking.event_queue import Guard

if TYPE_CHECKING:
    from paceline.profiler.collectives.recorder import RecordedGroup
    from paceline.profiler.tracking.step_tracker import StepTracker

INTERVAL_SECONDS, JOIN_SECONDS = 0.25, 1.0
STALL_STEPS, STALL_SECONDS = 8, 0.5
"""Training stands still if no step ends for this many usual steps and this many seconds."""
LAST_CALLS = 32
"""How many calls of a group are added: what ranks called before the one that does not end may
differ already."""

Groups = Mapping[str, "RecordedGroup"]
"""By name."""


def are_traced(log: CollectiveLog, groups: Groups) -> bool:
    """Whether the flight recorder has the last collectives of the log, and describes them alike."""
    calls = read_calls({name: group.calls_before for name, group in groups.items()})
    if not calls:
        return False
    traced = {
        (groups[call.group].index, _sequence(call, groups)): (call.operation, call.size_bytes)
        for call in calls
    }
    own = {
        (int(record["group"]), int(record["sequence"])): (
            int(record["operation"]),
            int(record["bytes"]),
        )
        for record in log.read()[-len(calls) :]
    }
    # A barrier has no size.
    sized = {key: call for key, call in own.items() if call[1]}
    return bool(sized) and all(traced.get(key) == call for key, call in sized.items())


def _sequence(call: TracedCall, groups: Groups) -> int:
    """Its number in the log, which counts from 0 and from the first record."""
    return call.number - groups[call.group].calls_before - 1


class PausedCalls:
    """Watches the program in each pause, from `begin` to `end`."""

    def __init__(
        self,
        log: CollectiveLog,
        tracker: StepTracker,
        guard: Guard,
        numbers: Callable[[], dict[int, int]],
    ) -> None:
        """`numbers`: by index of a group, how many of its collectives were called."""
        self._log, self._tracker, self._numbers = log, tracker, numbers
        self._groups: Groups = {}
        self._stall_seconds = STALL_SECONDS
        self._is_paused = False
        self._read: dict[int, int] = {}
        """`numbers` when the flight recorder was last read."""
        self._written: dict[str, int] = {}
        """By name: the number of the last collective that is in the log."""
        self._open: dict[tuple[str, int], int] = {}
        """Positions of those that have not ended, by name and number."""
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._add = guard(self._add_calls)
        self._thread = threading.Thread(
            target=guard(self._watch), name="paceline-stalls", daemon=True
        )
        self._thread.start()

    def begin(self, groups: Groups, step_seconds: float) -> None:
        calls = self._numbers()
        written = {
            name: group.calls_before + calls.get(group.index, 0) for name, group in groups.items()
        }
        with self._lock:
            self._groups, self._read, self._written = groups, calls, written
            self._stall_seconds = max(STALL_SECONDS, STALL_STEPS * step_seconds)
            self._is_paused = True

    def end(self) -> None:
        with self._lock:
            self._is_paused = False
            self._end_all()

    def remove(self, *, has_failed: bool = False) -> None:
        """Stop watching; `has_failed`: an exception ends the program."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        if has_failed:
            self._add()

    def _watch(self) -> None:
        updates, since = -1, 0.0
        while not self._is_over.wait(INTERVAL_SECONDS):
            now = perf_counter()
            if self._tracker.events.updates != updates:
                updates, since = self._tracker.events.updates, now
                with self._lock:
                    self._end_all()
            elif now - since > self._stall_seconds:
                self._add_calls()
                since = perf_counter()

    def _add_calls(self) -> None:
        """Add what was called since the pause, and note which of them ended."""
        with self._lock:
            if not self._is_paused:
                return
            numbers = self._numbers()
            if numbers == self._read and not self._open:
                # Nothing was called since, and all that was called before has ended.
                return
            self._read = numbers
            before = {name: number - LAST_CALLS for name, number in self._written.items()}
            calls = read_calls(before)
            for name, number in list(self._written.items()):
                own = [call for call in calls if call.group == name]
                in_progress = {call.number for call in own if not call.has_ended}
                # One that the flight recorder has overwritten has ended, too.
                for key in [key for key in self._open if key[0] == name]:
                    if key[1] not in in_progress:
                        self._end(key)
                for call in own:
                    is_last = call.number > own[-1].number - LAST_CALLS
                    if call.number > number and (is_last or not call.has_ended):
                        self._add_call(call)
            known = {
                str(self._groups[name].index): number - self._groups[name].calls_before
                for name, number in self._written.items()
            }
            self._log.describe("calls", calls=known)

    def _add_call(self, call: TracedCall) -> None:
        position = self._log.add(
            self._groups[call.group].index,
            call.operation,
            TRACED,
            _sequence(call, self._groups),
            call.size_bytes,
            Counts(),
            -1,
            call.arrival,
        )
        self._written[call.group] = call.number
        self._open[call.group, call.number] = position
        if call.has_ended:
            self._end((call.group, call.number))

    def _end(self, key: tuple[str, int]) -> None:
        position = self._open.pop(key, None)
        if position is not None:
            self._log.set_flag(position, POLLED)
            self._log.end(position, perf_counter())

    def _end_all(self) -> None:
        """Training goes on."""
        for key in list(self._open):
            self._end(key)
