"""The phase clock of a worker on a GPU: a phase lasts as long as the GPU takes for its work.

A GPU computes after it was told to, while the program is already in a later phase. So each change
of phase puts a mark between the work before it and the work after it, and the phase ends when the
GPU gets to the mark. Where the GPU has nothing to do, that is when the program gets there; so the
times between marks add up to the wall time here too. They are asked for in blocks, later: waiting
for the GPU at each change of phase would leave it idle until it is told the next thing
(docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Literal, Protocol, Self

import torch

from paceline.measure.clock import PhaseClock
from paceline.measure.phase_log import Span

MARKS_AT_MOST = 4096
"""That wait to be asked; the journal asks a few times a second, long before."""

Lap = Literal["begin", "end"] | None


class Mark(Protocol):
    """As torch.cuda.Event."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Self, /) -> float:
        """Milliseconds from here to a later mark."""


class GpuPhaseClock(PhaseClock):
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

    def begin_lap(self, phase: str) -> float:
        return self._enter(phase, lap="begin")

    def end_lap(self, phase: str) -> float:
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
        return GpuPhaseClock(PhaseClock(), self._put_mark)


def clock_of(device: torch.device, before: PhaseClock) -> PhaseClock:
    """The clock for work on a device, going on from one that has run so far."""
    if device.type != "cuda":
        return before
    stream = torch.cuda.current_stream(device)

    def put_mark(old: Mark | None) -> Mark:
        event = old if isinstance(old, torch.cuda.Event) else torch.cuda.Event(enable_timing=True)
        stream.record_event(event)
        return event

    return GpuPhaseClock(before, put_mark)
