"""Phases and traffic of the steps after the first, which is excluded because of its warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.measure.phase_clock import PhaseClock
from paceline.records import BETWEEN_ITERATIONS
from paceline.strategies.replica import Replica


@dataclass(frozen=True, slots=True)
class _Totals:
    phases: Mapping[str, float]
    hidden: float | None
    """None where overlapped communication is not measured."""
    sent: Mapping[str, int] | None
    """Bytes by kind; None if a checkpoint of an earlier version lacks them."""

    def plus(self, other: _Totals, sign: int = 1) -> _Totals:
        hidden = None
        if self.hidden is not None and other.hidden is not None:
            hidden = self.hidden + sign * other.hidden
        phases = {
            name: spent + sign * other.phases.get(name, 0.0) for name, spent in self.phases.items()
        }
        sent = None
        if self.sent is not None and other.sent is not None:
            sent = {kind: count + sign * other.sent[kind] for kind, count in self.sent.items()}
        return _Totals(phases, hidden, sent)

    def minus(self, other: _Totals) -> _Totals:
        return self.plus(other, -1)


class SteadyPhases:
    """Splits the steps after the first by phase, without what happens between steps.

    Call `first_done` after each step, and `end` when the waits of the last step are attributed. A
    resumed run calls `resume` first.
    """

    def __init__(self, clock: PhaseClock, replica: Replica) -> None:
        self._clock = clock
        self._replica = replica
        self._begin: _Totals | None = None
        """Totals of this process that do not count."""
        self._end: _Totals | None = None
        self._is_known = True

    def resume(self, before: Mapping[str, Any] | None) -> None:
        """Continue from `to_dict` of a checkpoint that was written after the first iteration.

        None if the checkpoint is of a version without these values: then the run has none either.
        """
        self._begin = self._now()
        self._is_known = before is not None
        if before is not None:
            earlier = _Totals(
                before["phases"], before["hidden_exchange_seconds"], before.get("bytes_sent")
            )
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
        """Return seconds by phase and of overlapped communication, and bytes; None if unknown."""
        if not self._is_known:
            return None
        now = self._end or self._now()
        spent = now.minus(self._begin or now)
        return {
            "phases": dict(spent.phases),
            "hidden_exchange_seconds": spent.hidden,
            "bytes_sent": None if spent.sent is None else dict(spent.sent),
        }

    def _now(self) -> _Totals:
        seconds = self._clock.seconds.items()
        phases = {name: spent for name, spent in seconds if name not in BETWEEN_ITERATIONS}
        counts = self._replica.communicator.traffic.counts.items()
        sent = {kind: count.bytes_sent for kind, count in counts}
        return _Totals(phases, self._replica.hidden_exchange_seconds, sent)
