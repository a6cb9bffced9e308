"""When each phase began and ended, for as long as somebody watches a phase clock.

The phase clock: every second of a worker's wall time belongs to exactly one phase.

The clock is always in one phase; entering the next one ends it. The phases therefore add up to the
wall time by construction, and what nobody claimed shows as "other".

On a GPU, which computes later than it is told to, gpu_clock.py counts the GPU's time instead.

The phase clock of a worker on a GPU: a phase lasts as long as the GPU takes for its work.

A GPU computes after it was told to, while the program is already in a later phase. So each change
of phase puts a mark between the work before it and the work after it, and the phase ends when the
GPU gets to the mark. Where the GPU has nothing to do, that is when the program gets there; so the
times between marks add up to the wall time here too. They are asked for in blocks, later: waiting
for the GPU at each change of phase would leave it idle until it is told the next thing
(docs/log.md)."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from time import perf_counter
from typing import Literal, Protocol, Self

import torch

from paceline.measure.startup import StartupTimer
from paceline.records import PHASES


@dataclass(slots=True)
class Span:
    """A stretch of time, in seconds of this machine's performance counter."""

    name: str
    began: float
    ended: float


@dataclass(slots=True)
class PhaseLog:
    phases: list[Span] = field(default_factory=list)
    """In order, each beginning where the one before ended."""
    laps: list[Span] = field(default_factory=list)

    def relabel(self, source: str, target: str, began: float, ended: float) -> None:
        """What was logged as `source` within this stretch turned out to be `target`."""
        index = max(0, bisect_right(self.phases, began, key=attrgetter("began")) - 1)
        while index < len(self.phases) and self.phases[index].began < ended:
            phase = self.phases[index]
            begin, end = max(phase.began, began), min(phase.ended, ended)
            if phase.name != source or begin >= end:
                index += 1
                continue
            pieces = (
                Span(source, phase.began, begin),
                Span(target, begin, end),
                Span(source, end, phase.ended),
            )
            kept = [piece for piece in pieces if piece.began < piece.ended]
            self.phases[index : index + 1] = kept
            index += len(kept)


class PhaseClock:
    def __init__(self) -> None:
        self.switches = 0
        self.started = self._since = perf_counter()
        self._phase = "other"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._laps = array("d")
        self._laps_taken = 0
        self._lap_began = self.started
        self.startup = StartupTimer(self.started)
        self.log: PhaseLog | None = None
        """What was noted while somebody watched; what is found out later is noted there too."""
        self._watcher: PhaseLog | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Spent in each phase, up to the last change of phase."""
        self._settle()
        return self._seconds

    @property
    def lap_seconds(self) -> array[float]:
        """Length of each lap (an iteration) that has ended."""
        self._settle()
        return self._laps

    def enter(self, phase: str) -> float:
        """End the current phase, begin `phase`; returns the moment."""
        now = perf_counter()
        self._seconds[self._phase] += now - self._since
        if self._watcher is not None:
            self._watcher.phases.append(Span(self._phase, self._since, now))
        self._phase, self._since = phase, now
        self.switches += 1
        return now

    def arrive(self, phase: str) -> float:
        """Like `enter`, but only once everything that was begun before is done."""
        return self.enter(phase)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in `phase` for a block, then back in the one before."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def begin_step(self, phase: str) -> float:
        """Enter `phase`, and begin to time a lap there."""
        self._lap_began = self.enter(phase)
        return self._lap_began

    def end_step(self, phase: str) -> float:
        """Enter `phase`, and end the lap there."""
        now = self.enter(phase)
        self._laps.append(now - self._lap_began)
        if self._watcher is not None:
            self._watcher.laps.append(Span("lap", self._lap_began, now))
        return now

    def take_laps(self) -> list[float]:
        """Length of each lap that has ended since the last time asked."""
        laps = self.lap_seconds[self._laps_taken :]
        self._laps_taken += len(laps)
        return laps.tolist()

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count seconds under another phase, once it is known what they were spent on."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def start_log(self) -> PhaseLog:
        """From here on, until `stop_log`, note when phases and laps begin and end."""
        self.enter(self._phase)
        self._settle()
        self.log = self._watcher = PhaseLog()
        return self.log

    def stop_log(self) -> None:
        if self._watcher is not None:
            self.enter(self._phase)
            self._settle()
            self._watcher = None

    def settle_log(self) -> None:
        """While somebody watches, note every phase up to now in the log."""
        if self._watcher is not None:
            self._settle()

    @property
    def wall_seconds(self) -> float:
        """Since the clock was made, up to the last change of phase."""
        return self._since - self.started

    def seconds_per_switch(self, repeats: int = 2000) -> float:
        """What one change of phase costs on this machine, for the account of measuring itself."""
        clock = self._another()
        begin = perf_counter()
        for _ in range(repeats):
            clock.enter("other")
        clock._settle()
        return (perf_counter() - begin) / repeats

    def _settle(self) -> None:
        """Take in times that could not be known when the phases changed: here there are none."""

    def _another(self) -> PhaseClock:
        return PhaseClock()


MARKS_AT_MOST = 4096
"""That wait to be asked; the journal asks a few times a second, long before."""

Lap = Literal["begin", "end"] | None


class Mark(Protocol):
    """As torch.cuda.Event."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Self, /) -> float:
        """Milliseconds from here to a later mark."""


class CudaPhaseClock(PhaseClock):
    """Goes on from a clock that has run until the GPU was there to be used."""

    def __init__(self, before: PhaseClock, put_mark: Callable[[Mark | None], Mark]) -> None:
        """`put_mark` puts a mark behind the GPU's work so far, an old one again where given."""
        super().__init__()
        self.started, self.switches = before.started, before.switches
        self.startup = before.startup
        self._put_mark = put_mark
        self._free: list[Mark] = []
        self._waiting: list[tuple[str, Mark, Lap]] = []
        """The phase that a mark ends, the mark, and whether a lap begins or ends there."""
        self._last = put_mark(None)
        self._last.synchronize()
        self._since = self._origin = before.enter("other")
        self._seconds = dict(before.seconds)
        self._now = 0.0
        """When the GPU got to the last mark that was settled, in seconds since the first."""

    def enter(self, phase: str) -> float:
        """The moment returned is the program's, which may be ahead of the GPU.

        An exchange is entered together: it needs what the GPU has computed, and the workers compare
        when each of them was ready for it.
        """
        return self._enter(phase, waits=phase == "exchange")

    def arrive(self, phase: str) -> float:
        return self._enter(phase, waits=True)

    def begin_step(self, phase: str) -> float:
        return self._enter(phase, lap="begin")

    def end_step(self, phase: str) -> float:
        return self._enter(phase, lap="end")

    def _enter(self, phase: str, *, waits: bool = False, lap: Lap = None) -> float:
        mark = self._put_mark(self._free.pop() if self._free else None)
        self._waiting.append((self._phase, mark, lap))
        if waits:
            mark.synchronize()
        self._phase, self._since = phase, perf_counter()
        self.switches += 1
        if len(self._waiting) >= MARKS_AT_MOST:
            self._settle()
        return self._since

    def _settle(self) -> None:
        if not self._waiting:
            return
        self._waiting[-1][1].synchronize()
        for phase, mark, lap in self._waiting:
            seconds = self._last.elapsed_time(mark) / 1000
            self._seconds[phase] += seconds
            if self._watcher is not None:
                self._watcher.phases.append(
                    Span(phase, self._origin + self._now, self._origin + self._now + seconds)
                )
            self._now += seconds
            if lap == "begin":
                self._lap_began = self._now
            elif lap == "end":
                self._laps.append(self._now - self._lap_began)
                if self._watcher is not None:
                    began, ended = self._origin + self._lap_began, self._origin + self._now
                    self._watcher.laps.append(Span("lap", began, ended))
            self._free.append(self._last)
            self._last = mark
        self._waiting.clear()

    def _another(self) -> PhaseClock:
        return CudaPhaseClock(PhaseClock(), self._put_mark)


def clock_for(device: torch.device, before: PhaseClock) -> PhaseClock:
    """The clock for work on a device, going on from one that has run so far."""
    if device.type != "cuda":
        return before
    stream = torch.cuda.current_stream(device)

    def put_mark(old: Mark | None) -> Mark:
        event = old if isinstance(old, torch.cuda.Event) else torch.cuda.Event(enable_timing=True)
        stream.record_event(event)
        return event

    return CudaPhaseClock(before, put_mark)
