"""Phase clocks: every second of a worker's wall time belongs to exactly one phase.

The clock is always in one phase, and entering the next one ends it. The phases therefore add up to
the wall time by construction; unclaimed time counts as "other".

On a GPU, kernels run after they are launched, while the program is already in a later phase.
`CudaPhaseClock` therefore records a mark (a CUDA event) at each phase change, and a phase ends when
the GPU reaches the mark. An idle GPU reaches it immediately, so the times between marks add up to
the wall time, too. Marks are read in batches: waiting for the GPU at each phase change would leave
it idle until the next launch (docs/design-notes.md).
"""

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

MAX_PENDING_MARKS = 4096
"""The run logger settles the clock a few times per second, long before this limit."""

StepEvent = Literal["begin", "end"] | None


@dataclass(slots=True)
class Span:
    """A time interval in seconds of `perf_counter`."""

    name: str
    began: float
    ended: float


@dataclass(slots=True)
class PhaseLog:
    """Start and end of each phase and step while logging is active."""

    phases: list[Span] = field(default_factory=list)
    """In order and without gaps."""
    steps: list[Span] = field(default_factory=list)

    def relabel(self, source: str, target: str, began: float, ended: float) -> None:
        """Change phase `source` to `target` within the interval from `began` to `ended`."""
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
    """Measures phases and steps in the time of the program."""

    def __init__(self) -> None:
        self.switches = 0
        self.started = self._since = perf_counter()
        self.phase = "other"
        """The current phase."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._step_seconds = array("d")
        self._steps_taken = 0
        self._step_began = self.started
        self.startup = StartupTimer(self.started)
        self.log: PhaseLog | None = None
        """The current or last log; phases may still be relabeled after logging stops."""
        self._active_log: PhaseLog | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds in each phase up to the last phase change."""
        self._settle()
        return self._seconds

    @property
    def step_seconds(self) -> array[float]:
        """Duration of each completed step."""
        self._settle()
        return self._step_seconds

    def enter(self, phase: str) -> float:
        """End the current phase and begin `phase`; returns the time of the change."""
        now = perf_counter()
        self._seconds[self.phase] += now - self._since
        if self._active_log is not None:
            self._active_log.phases.append(Span(self.phase, self._since, now))
        self.phase, self._since = phase, now
        self.switches += 1
        return now

    def arrive(self, phase: str) -> float:
        """Like `enter`, but wait for all work that was started before."""
        return self.enter(phase)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enter `phase` for a `with` block, then return to the previous phase."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def begin_step(self, phase: str) -> float:
        """Enter `phase` and begin a step."""
        self._step_began = self.enter(phase)
        return self._step_began

    def end_step(self, phase: str) -> float:
        """Enter `phase` and end the step."""
        now = self.enter(phase)
        self._step_seconds.append(now - self._step_began)
        if self._active_log is not None:
            self._active_log.steps.append(Span("step", self._step_began, now))
        return now

    def take_step_seconds(self) -> list[float]:
        """Return the duration of each step that ended since the last call."""
        seconds = self.step_seconds[self._steps_taken :]
        self._steps_taken += len(seconds)
        return seconds.tolist()

    def move(self, source: str, target: str, seconds: float) -> None:
        """Reassign seconds from one phase to another."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def start_log(self) -> PhaseLog:
        """Log the start and end of phases and steps until `stop_log`."""
        self.enter(self.phase)
        self._settle()
        self.log = self._active_log = PhaseLog()
        return self.log

    def stop_log(self) -> None:
        if self._active_log is not None:
            self.enter(self.phase)
            self._settle()
            self._active_log = None

    def settle_log(self) -> None:
        """Bring an active log up to date."""
        if self._active_log is not None:
            self._settle()

    @property
    def wall_seconds(self) -> float:
        """Seconds from the creation of the clock to the last phase change."""
        return self._since - self.started

    def seconds_per_switch(self, repeats: int = 2000) -> float:
        """Measure the cost of one phase change, to report the overhead of measuring."""
        clock = self._new_clock()
        begin = perf_counter()
        for _ in range(repeats):
            clock.enter("other")
        clock._settle()
        return (perf_counter() - begin) / repeats

    def _settle(self) -> None:
        """Process phase changes whose times were not known yet; a CPU clock has none."""

    def _new_clock(self) -> PhaseClock:
        return PhaseClock()


class Mark(Protocol):
    """The part of torch.cuda.Event that the clock uses."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Self, /) -> float:
        """Return the milliseconds from this mark to a later one."""


class CudaPhaseClock(PhaseClock):
    """Measures phases in GPU time; continues a CPU clock that ran until the GPU was ready."""

    def __init__(self, before: PhaseClock, record_mark: Callable[[Mark | None], Mark]) -> None:
        """`record_mark` records a mark after the GPU work so far, reusing a given mark."""
        super().__init__()
        self.started, self.switches = before.started, before.switches
        self.startup = before.startup
        self._record_mark = record_mark
        self._free: list[Mark] = []
        self._pending: list[tuple[str, Mark, StepEvent]] = []
        """The phase that a mark ends, the mark, and whether a step begins or ends there."""
        self._last = record_mark(None)
        self._last.synchronize()
        self._since = self._origin = before.enter("other")
        self._seconds = dict(before.seconds)
        self._now = 0.0
        """Time of the last processed mark in seconds since the first."""

    def enter(self, phase: str) -> float:
        """Return the time of the program, which may be ahead of the GPU.

        Entering "exchange" waits for the GPU: the exchange needs its results, and workers compare
        the times at which they were ready.
        """
        return self._enter(phase, waits=phase == "exchange")

    def arrive(self, phase: str) -> float:
        return self._enter(phase, waits=True)

    def begin_step(self, phase: str) -> float:
        return self._enter(phase, event="begin")

    def end_step(self, phase: str) -> float:
        return self._enter(phase, event="end")

    def _enter(self, phase: str, *, waits: bool = False, event: StepEvent = None) -> float:
        mark = self._record_mark(self._free.pop() if self._free else None)
        self._pending.append((self.phase, mark, event))
        if waits:
            mark.synchronize()
        self.phase, self._since = phase, perf_counter()
        self.switches += 1
        if len(self._pending) >= MAX_PENDING_MARKS:
            self._settle()
        return self._since

    def _settle(self) -> None:
        if not self._pending:
            return
        self._pending[-1][1].synchronize()
        for phase, mark, event in self._pending:
            seconds = self._last.elapsed_time(mark) / 1000
            self._seconds[phase] += seconds
            if self._active_log is not None:
                self._active_log.phases.append(
                    Span(phase, self._origin + self._now, self._origin + self._now + seconds)
                )
            self._now += seconds
            if event == "begin":
                self._step_began = self._now
            elif event == "end":
                self._step_seconds.append(self._now - self._step_began)
                if self._active_log is not None:
                    began, ended = self._origin + self._step_began, self._origin + self._now
                    self._active_log.steps.append(Span("step", began, ended))
            self._free.append(self._last)
            self._last = mark
        self._pending.clear()

    def _new_clock(self) -> PhaseClock:
        return CudaPhaseClock(PhaseClock(), self._record_mark)


def clock_for(device: torch.device, before: PhaseClock) -> PhaseClock:
    """Return the clock for a device, which continues the clock `before`."""
    if device.type != "cuda":
        return before
    stream = torch.cuda.current_stream(device)

    def record_mark(old: Mark | None) -> Mark:
        event = old if isinstance(old, torch.cuda.Event) else torch.cuda.Event(enable_timing=True)
        stream.record_event(event)
        return event

    return CudaPhaseClock(before, record_mark)
