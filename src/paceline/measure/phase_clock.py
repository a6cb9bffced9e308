"""Phase clocks: every second of a worker's wall time belongs to exactly one phase.

The clock is always in one phase, and entering the next one ends it. The phases therefore add up to
the wall time by construction; unclaimed time counts as "other".

On a GPU, kernels run after they are launched, while the program is already in a later phase.
`CudaPhaseClock` therefore records a mark (a CUDA event) at each phase change, and a phase ends when
the GPU reaches the mark. An idle GPU reaches it immediately, so the times between marks add up to
the wall time, too. Marks are read in batches: waiting for the GPU at each phase change would leave
it idle until the next launch (docs/design-notes.md).

While a CUDA graph is captured, the marks become part of the graph (`CudaPhaseClock.capture`). Every
replay records them again, so they must be read before the graph is replayed for the next time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from time import perf_counter
from typing import Literal, NamedTuple, Protocol, Self

import torch

from paceline.measure.startup import StartupTimer
from paceline.records import PHASES

MAX_PENDING_MARKS = 4096
"""The run logger settles the clock a few times per second, long before this limit."""

ANCHOR_SECONDS = 0.1
"""Interval at which the clocks of GPU and program are compared; they drift by about 2 us in it."""

MarkEvent = Literal["begin", "end", "next", "exposed", "excluded"] | None
"""What a mark is besides a phase change: begin or end of a step, or both; the end of exposed
communication, or of a phase that is not part of the step."""


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


class ExposedIntervals:
    """Start and end times of exposed communication, which training waits for.

    Ranks compare these times to separate waiting for a straggler from moving data. All ranks of a
    synchronous strategy must therefore record the same sequence of intervals.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.began = array("d")
        self.ended = array("d")
        self.arrived = array("d")
        """When this rank issued what it waits for: at the start, unless that was before."""

    def add(self, began: float, ended: float, arrived: float | None = None) -> None:
        """Add an interval, in the order of their starts."""
        index = bisect_right(self.began, began)
        self.began.insert(index, began)
        self.ended.insert(index, ended)
        self.arrived.insert(index, began if arrived is None else arrived)


class PhaseClock:
    """Measures phases and steps in the time of the program."""

    def __init__(self, time: Callable[[], float] | None = None) -> None:
        """`time` is called instead of `perf_counter`."""
        self._time = time or perf_counter
        self.switches = 0
        self.started = self._since = self._time()
        self.phase = "other"
        """The current phase."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._step_seconds = array("d")
        self._steps_taken = 0
        self._step_began = self.started
        self._excluded_until = 0.0
        """End of the last phase that is not part of its step: a log has the step from there on."""
        self.startup = StartupTimer(self.started)
        self.log: PhaseLog | None = None
        """The current or last log; phases may still be relabeled after logging stops."""
        self._active_log: PhaseLog | None = None
        self._exposed = ExposedIntervals()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds in each phase up to the last phase change."""
        self._settle()
        return self._seconds

    @property
    def known_seconds(self) -> dict[str, float]:
        """Seconds in each phase up to the last change whose time is known; does not wait."""
        return self._seconds

    @property
    def exposed(self) -> ExposedIntervals:
        """Intervals of exposed communication that ended."""
        self._settle()
        return self._exposed

    @property
    def step_seconds(self) -> array[float]:
        """Duration of each completed step."""
        self._settle()
        return self._step_seconds

    def enter(self, phase: str) -> float:
        """End the current phase and begin `phase`; returns the time of the change."""
        now = self._time()
        self._seconds[self.phase] += now - self._since
        if self._active_log is not None:
            self._active_log.phases.append(Span(self.phase, self._since, now))
        self.phase, self._since = phase, now
        self.switches += 1
        return now

    def arrive(self, phase: str) -> float:
        """Like `enter`, but wait for all work that was started before."""
        return self.enter(phase)

    def end_exposed(self, phase: str, arrived: float | None = None) -> None:
        """Enter `phase`; the phase that ends was exposed communication.

        `arrived`: when it was issued, if that was before the phase.
        """
        began = self._since
        self._exposed.add(began, self.enter(phase), arrived)

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

    def exclude(self, phase: str) -> tuple[float, float]:
        """Enter `phase`; the one that ends is not part of the step. Returns when it was."""
        began, now = self._since, self.enter(phase)
        self._step_began += now - began
        self._excluded_until = now
        return began, now

    def end_step(self, phase: str) -> float:
        """Enter `phase` and end the step."""
        now = self.enter(phase)
        self._step_seconds.append(now - self._step_began)
        if self._active_log is not None:
            began = max(self._step_began, self._excluded_until)
            self._active_log.steps.append(Span("step", began, now))
        return now

    def next_step(self, phase: str) -> float:
        """Enter `phase`, end the step and begin the next one."""
        now = self.end_step(phase)
        self._step_began = now
        return now

    def take_step_seconds(self, steps: int) -> list[float]:
        """Return the durations of the next `steps` steps after those that were taken before."""
        first, self._steps_taken = self._steps_taken, self._steps_taken + steps
        if len(self._step_seconds) < self._steps_taken:
            self._settle()
        return self._step_seconds[first : self._steps_taken].tolist()

    def move(self, source: str, target: str, seconds: float) -> None:
        """Reassign seconds from one phase to another."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def expose(self, source: str, began: float, ended: float) -> None:
        """Reassign an interval of phase `source` to exposed communication."""
        self.move(source, "exchange", ended - began)
        if self.log is not None:
            self.settle_log()
            self.log.relabel(source, "exchange", began, ended)
        self._exposed.add(began, ended)

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

    def measuring_seconds(self, repeats: int = 2000) -> float:
        """Estimate the time that all phase changes so far took the program."""
        clock = self._new_clock()
        began = perf_counter()
        for _ in range(repeats):
            clock.enter("other")
        entered = perf_counter()
        clock._settle()
        settled = perf_counter()
        changes = self.switches * (entered - began) + self._settled_changes * (settled - entered)
        return changes / repeats

    @property
    def _settled_changes(self) -> int:
        """How many phase changes were processed after they were made."""
        return 0

    def settle_ready(self) -> None:
        """Process phase changes that a GPU has reached, without waiting for others."""

    def use_current_stream(self) -> None:
        """Mark phase changes in the work of the current stream of a GPU from now on."""

    def is_up_to_date(self) -> bool:
        """Whether no GPU is behind the program by more than the current phase."""
        return True

    def _settle(self) -> None:
        """Process phase changes whose times were not known yet; a CPU clock has none."""

    def _new_clock(self) -> PhaseClock:
        return PhaseClock()


class Mark(Protocol):
    """The part of torch.cuda.Event that the clock uses."""

    def query(self) -> bool:
        """Return whether the GPU has reached the mark."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Self, /) -> float:
        """Return the milliseconds from this mark to a later one."""


class MarkRecorder(Protocol):
    """Records marks in the work of a GPU."""

    def record(self, old: Mark | None) -> Mark:
        """Record a mark after the work so far, reusing the mark `old` if there is one."""

    def record_in_graph(self) -> Mark:
        """Make a mark part of the graph that is being captured; each replay records it again."""

    def record_anchor(self) -> Mark:
        """Record a mark that does not wait for any work."""

    def use_current_stream(self) -> None:
        """Record marks in the work of the current stream from now on."""


class _PendingMark(NamedTuple):
    phase: str
    """The phase that the mark ends."""
    mark: Mark
    event: MarkEvent
    is_in_graph: bool = False


class CapturedMarks:
    """The marks of one graph."""

    def __init__(self) -> None:
        self.marks: list[_PendingMark] = []
        self.last_phase = ""
        """The phase after the last mark."""
        self.replays_until = 0
        """Value of the clock's count of marks after which the marks of the last replay are read."""


class CudaPhaseClock(PhaseClock):
    """Measures phases in GPU time; continues a CPU clock that ran until the GPU was ready."""

    def __init__(self, before: PhaseClock, recorder: MarkRecorder) -> None:
        super().__init__()
        self.started, self.switches = before.started, before.switches
        self.startup = before.startup
        self._recorder = recorder
        self._free: list[Mark] = []
        self._pending: deque[_PendingMark] = deque()
        self._settled = 0
        """Number of marks that were processed."""
        self._capturing: CapturedMarks | None = None
        self._last = recorder.record(None)
        self._last.synchronize()
        self._last_is_in_graph = False
        self._since = self._origin = self._anchored = before.enter("other")
        self._seconds = dict(before.seconds)
        self._now = 0.0
        """Time of the last processed mark in seconds since the first."""
        self._exposed = before.exposed

    def enter(self, phase: str) -> float:
        """Return the time of the program, which may be ahead of the GPU."""
        return self._enter(phase)

    def arrive(self, phase: str) -> float:
        return self._enter(phase, waits=True)

    def begin_step(self, phase: str) -> float:
        return self._enter(phase, event="begin")

    def exclude(self, phase: str) -> tuple[float, float]:
        began = self._since
        return began, self._enter(phase, event="excluded")

    def end_step(self, phase: str) -> float:
        return self._enter(phase, event="end")

    def next_step(self, phase: str) -> float:
        return self._enter(phase, event="next")

    def end_exposed(self, phase: str, arrived: float | None = None) -> None:
        """`arrived` is a time of the program, and the phase is one of the GPU."""
        self._enter(phase, event="exposed")

    def _enter(self, phase: str, *, waits: bool = False, event: MarkEvent = None) -> float:
        if self._capturing is not None:
            mark = self._recorder.record_in_graph()
            self._capturing.marks.append(_PendingMark(self.phase, mark, event, is_in_graph=True))
            self.phase = phase
            return perf_counter()
        mark = self._recorder.record(self._free.pop() if self._free else None)
        self._pending.append(_PendingMark(self.phase, mark, event))
        if waits:
            mark.synchronize()
        self.phase, self._since = phase, perf_counter()
        self.switches += 1
        if len(self._pending) >= MAX_PENDING_MARKS:
            self._settle()
        return self._since

    @contextmanager
    def capture(self) -> Iterator[CapturedMarks]:
        """Make the phase changes of a `with` block part of the graph that it captures.

        Nothing runs during a capture, so afterwards the clock is in the same phase as before.
        """
        before, captured = self.phase, CapturedMarks()
        self._capturing = captured
        try:
            yield captured
            captured.last_phase = self.phase
        finally:
            self._capturing, self.phase = None, before

    def before_replay(self, captured: CapturedMarks) -> None:
        """Read the marks of the last replay, which the next one overwrites.

        Waits until the GPU has passed the mark after them, from which later marks are measured.
        """
        self._settle_through(captured.replays_until)

    def replayed(self, captured: CapturedMarks) -> None:
        """Count the phase changes of a replay that was just launched."""
        self._pending.extend(captured.marks)
        self.phase, self._since = captured.last_phase, perf_counter()
        # One more: the next mark is not part of the graph, so it stays valid.
        captured.replays_until = self._settled + len(self._pending) + 1

    @property
    def _settled_changes(self) -> int:
        return self._settled

    def use_current_stream(self) -> None:
        self._recorder.use_current_stream()

    def is_up_to_date(self) -> bool:
        return not self._pending or self._pending[-1].mark.query()

    def settle_ready(self) -> None:
        pending = self._pending
        # Usually the GPU has reached all of them, and one query tells.
        if pending and pending[-1].mark.query():
            self._settle()
        while pending and pending[0].mark.query():
            self._process(pending.popleft())

    def _settle(self) -> None:
        self._settle_through(self._settled + len(self._pending))

    def _settle_through(self, count: int) -> None:
        """Process marks until `count` marks are processed in total."""
        due = min(count - self._settled, len(self._pending))
        if due <= 0:
            return
        self._pending[due - 1].mark.synchronize()
        for _ in range(due):
            self._process(self._pending.popleft())

    def _process(self, pending: _PendingMark) -> None:
        mark, event = pending.mark, pending.event
        seconds = self._last.elapsed_time(mark) / 1000
        began, self._now = self._now, self._now + seconds
        self._seconds[pending.phase] += seconds
        if event == "exposed":
            if perf_counter() - self._anchored > ANCHOR_SECONDS:
                self._compare_clocks(mark)
            self._exposed.add(self._origin + began, self._origin + self._now)
        log = self._active_log
        if log is not None:
            log.phases.append(Span(pending.phase, self._origin + began, self._origin + self._now))
        if event == "begin":
            self._step_began = self._now
        elif event == "excluded":
            self._step_began += seconds
            self._excluded_until = self._now
        elif event in ("end", "next"):
            self._step_seconds.append(self._now - self._step_began)
            if log is not None:
                step_began = max(self._step_began, self._excluded_until)
                span = Span("step", self._origin + step_began, self._origin + self._now)
                log.steps.append(span)
            if event == "next":
                self._step_began = self._now
        if not self._last_is_in_graph:
            self._free.append(self._last)
        self._last, self._last_is_in_graph = mark, pending.is_in_graph
        self._settled += 1

    def _compare_clocks(self, mark: Mark) -> None:
        """Correct the drift between GPU and program, which workers would see as waiting."""
        anchor = self._recorder.record_anchor()
        anchor.synchronize()
        self._anchored = perf_counter()
        self._origin = self._anchored - self._now - mark.elapsed_time(anchor) / 1000

    def _new_clock(self) -> PhaseClock:
        return CudaPhaseClock(PhaseClock(), self._recorder)


class _CudaMarkRecorder:
    """Records marks on the stream that was current when it was created."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._idle = torch.cuda.Stream(device)

    def record(self, old: Mark | None) -> Mark:
        event = old if isinstance(old, torch.cuda.Event) else torch.cuda.Event(enable_timing=True)
        self._stream.record_event(event)
        return event

    def record_in_graph(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True, external=True)
        self._stream.record_event(event)
        return event

    def record_anchor(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        self._idle.record_event(event)
        return event

    def use_current_stream(self) -> None:
        self._stream = torch.cuda.current_stream(self._device)


def clock_for(device: torch.device, before: PhaseClock) -> PhaseClock:
    """Return the clock for a device, which continues the clock `before`."""
    return before if device.type != "cuda" else CudaPhaseClock(before, _CudaMarkRecorder(device))
