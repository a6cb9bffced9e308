"""Phases of the steps after the first, which is excluded because it includes warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.measure.phase_clock import PhaseClock
from paceline.records import BETWEEN_ITERATIONS
from paceline.strategies.replica import Replica


@dataclass(frozen=True, slots=True)
class _Seconds:
    phases: Mapping[str, float]
    hidden: float | None
    """None where overlapped communication is not measured."""

    def plus(self, other: _Seconds, sign: int = 1) -> _Seconds:
        hidden = None
        if self.hidden is not None and other.hidden is not None:
            hidden = self.hidden + sign * other.hidden
        phases = {
            name: spent + sign * other.phases.get(name, 0.0) for name, spent in self.phases.items()
        }
        return _Seconds(phases, hidden)

    def minus(self, other: _Seconds) -> _Seconds:
        return self.plus(other, -1)


class SteadyPhases:
    """Splits the steps after the first by phase, without the time between steps.

    Call `first_done` after each step, and `end` when the waits of the last step are attributed. A
    resumed run calls `resume` first.
    """

    def __init__(self, clock: PhaseClock, replica: Replica) -> None:
        self._clock = clock
        self._replica = replica
        self._begin: _Seconds | None = None
        """Seconds of this process that do not count."""
        self._end: _Seconds | None = None
        self._is_known = True

    def resume(self, before: Mapping[str, Any] | None) -> None:
        """Continue from `to_dict` of a checkpoint that was written after the first iteration.

        None if the checkpoint is of a version without these values: then the run has none either.
        """
        self._begin = self._now()
        self._is_known = before is not None
        if before is not None:
            earlier = _Seconds(before["phases"], before["hidden_exchange_seconds"])
            self._begin = self._begin.minus(earlier)

    def first_done(self, settle: Callable[[], None] = lambda: None) -> None:
        """Start counting after the first step and a call of `settle`; later calls do nothing."""
        if self._begin is None:
            settle()
            self._begin = self._now()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Exclude a block between two steps."""
        before = self._now()
        try:
            yield
        finally:
            # After `end` nothing counts anyway, and excluding it would subtract it twice.
            if self._begin is not None and self._end is None:
                self._begin = self._begin.plus(self._now().minus(before))

    def end(self) -> None:
        """Stop counting here, or at the last call of several."""
        self._end = self._now()

    def leave_out(self) -> None:
        """Exclude the time since `end` and continue counting."""
        if self._begin is not None and self._end is not None:
            self._begin = self._begin.plus(self._now().minus(self._end))
        self._end = None

    def to_dict(self) -> dict[str, Any] | None:
        """Return seconds by phase and of overlapped communication; None if unknown."""
        if not self._is_known:
            return None
        now = self._end or self._now()
        spent = now.minus(self._begin or now)
        return {"phases": dict(spent.phases), "hidden_exchange_seconds": spent.hidden}

    def _now(self) -> _Seconds:
        seconds = self._clock.seconds.items()
        phases = {name: spent for name, spent in seconds if name not in BETWEEN_ITERATIONS}
        return _Seconds(phases, self._replica.hidden_exchange_seconds)
