"""The phase clock: every second of a worker's wall time belongs to exactly one phase.

The clock is always in one phase; entering the next one ends it. The phases therefore add up to the
wall time by construction, and what nobody claimed shows as "other".

On a GPU, which computes later than it is told to, gpu_clock.py counts the GPU's time instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from paceline.measure.phase_log import PhaseLog, Span
from paceline.measure.startup import StartupTimer
from paceline.records import PHASES


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

    def begin_lap(self, phase: str) -> float:
        """Enter `phase`, and begin to time a lap there."""
        self._lap_began = self.enter(phase)
        return self._lap_began

    def end_lap(self, phase: str) -> float:
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

    def watch(self) -> PhaseLog:
        """From here on, until `unwatch`, note when phases and laps begin and end."""
        self.enter(self._phase)
        self._settle()
        self.log = self._watcher = PhaseLog()
        return self.log

    def unwatch(self) -> None:
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
