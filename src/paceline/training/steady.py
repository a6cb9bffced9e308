"""Phases of the iterations after the first: the first one pays for warming up and is left out."""

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
    """Splits the iterations after the first by phase; what is outside of them is left out.

    Call `first_done` when the first iteration has ended and its waits are settled, and `end` when
    those of the last one are. A resumed run calls `resume` instead of `first_done`.
    """

    def __init__(self, clock: PhaseClock, replica: Replica) -> None:
        self._clock = clock
        self._replica = replica
        self._begin: _Seconds | None = None
        """Of this process, what does not count."""
        self._end: _Seconds | None = None
        self._is_known = True

    def resume(self, before: Mapping[str, Any] | None) -> None:
        """Continue from `to_dict` of a checkpoint that was written after the first iteration.

        None: the checkpoint is of a version without these figures, so the run has none either.
        """
        self._begin = self._now()
        self._is_known = before is not None
        if before is not None:
            earlier = _Seconds(before["phases"], before["hidden_exchange_seconds"])
            self._begin = self._begin.minus(earlier)

    def first_done(self, settle: Callable[[], None] = lambda: None) -> None:
        """After every iteration; only the first one has an effect, after a call of `settle`."""
        if self._begin is None:
            settle()
            self._begin = self._now()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What happens in a block between two iterations does not count."""
        before = self._now()
        try:
            yield
        finally:
            # After `end` nothing counts anyway, and would be subtracted from what did.
            if self._begin is not None and self._end is None:
                self._begin = self._begin.plus(self._now().minus(before))

    def end(self) -> None:
        """What follows does not count, unless `end` is called again."""
        self._end = self._now()

    def leave_out(self) -> None:
        """What came since `end` does not count, whatever follows."""
        if self._begin is not None and self._end is not None:
            self._begin = self._begin.plus(self._now().minus(self._end))
        self._end = None

    def to_dict(self) -> dict[str, Any] | None:
        """Seconds by phase and overlapped with them; None if unknown."""
        if not self._is_known:
            return None
        now = self._end or self._now()
        spent = now.minus(self._begin or now)
        return {"phases": dict(spent.phases), "hidden_exchange_seconds": spent.hidden}

    def _now(self) -> _Seconds:
        seconds = self._clock.seconds.items()
        phases = {name: spent for name, spent in seconds if name not in BETWEEN_ITERATIONS}
        return _Seconds(phases, self._replica.hidden_exchange_seconds)
