"""The phase clock: every second of a worker's wall time belongs to exactly one phase.

The clock is always in one phase; entering the next one ends it. The phases therefore add up to the
wall time by construction, and what nobody claimed shows as "other".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from paceline.records import PHASES


class PhaseClock:
    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.switches = 0
        self.started = self._since = perf_counter()
        self._phase = "other"

    def enter(self, phase: str) -> float:
        """End the current phase, begin `phase`; returns the moment, for timing iterations."""
        now = perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
        self.switches += 1
        return now

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in `phase` for a block, then back in the one before."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count seconds under another phase, once it is known what they were spent on."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    @property
    def wall_seconds(self) -> float:
        """Since the clock was made, up to the last change of phase."""
        return self._since - self.started

    @staticmethod
    def seconds_per_switch(repeats: int = 2000) -> float:
        """What one change of phase costs on this machine, for the account of measuring itself."""
        clock = PhaseClock()
        begin = perf_counter()
        for _ in range(repeats):
            clock.enter("other")
        return (perf_counter() - begin) / repeats
