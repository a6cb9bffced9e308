"""Trace of selected iterations: start and end of each phase and each transfer."""

from __future__ import annotations

from pathlib import Path

from paceline.measure.kernel_time import KernelTimer
from paceline.measure.phase_clock import PhaseClock, PhaseLog, Span
from paceline.measure.trace_file import TraceEvent, write_trace
from paceline.measure.traffic import CountedTransfer, Traffic

WARM_UP_ITERATIONS = 10
"""Skipped if the run has enough iterations, because the first ones include warm-up."""


class Tracer:
    """Logs clock and traffic of a worker for `iterations` of the `left` remaining iterations."""

    def __init__(
        self,
        clock: PhaseClock,
        traffic: Traffic,
        *,
        iterations: int,
        done: int,
        left: int,
        kernels: KernelTimer | None = None,
    ) -> None:
        """`kernels`: the kernel time of the traced iterations is measured, too."""
        self._clock, self._traffic, self._kernels = clock, traffic, kernels
        self._first = done + max(0, min(WARM_UP_ITERATIONS, left - iterations))
        self._last = self._first + iterations - 1
        self._log: PhaseLog | None = None
        self._transfers: list[CountedTransfer] = []

    def before_iteration(self, number: int) -> None:
        if number == self._first:
            self._log = self._clock.start_log()
            self._traffic.log = self._transfers
            # The log and its end wait for the GPU, so the window has all kernels of its iterations.
            if self._kernels is not None:
                self._kernels.start()
        elif number == self._last + 1:
            self._stop()

    def _stop(self) -> None:
        self._clock.stop_log()
        self._traffic.settle()
        self._traffic.log = None
        if self._kernels is not None:
            self._kernels.stop()

    def kernel_time(self) -> dict[str, float] | None:
        """Return the kernel time of the traced iterations and their duration; None if unknown."""
        self._stop()
        seconds = self._kernels.seconds() if self._kernels is not None else None
        if seconds is None or self._log is None or not self._log.steps:
            return None
        steps = self._log.steps
        return {
            "iterations": len(steps),
            "seconds": seconds,
            "window_seconds": steps[-1].ended - steps[0].began,
        }

    @property
    def began(self) -> float:
        """Start of the first traced iteration, or 0 if none was traced; stops tracing."""
        self._stop()
        return self._log.steps[0].began if self._log is not None and self._log.steps else 0.0

    def write(self, path: Path, rank: int, node: int, offset_seconds: float) -> None:
        """Write the trace after waits are attributed; writes nothing if no iteration was traced."""
        self._stop()
        if self._log is None or not self._log.steps:
            return
        write_trace(
            path,
            rank,
            node,
            offset_seconds=offset_seconds,
            first_iteration=self._first,
            steps=[_event(span) for span in self._log.steps],
            phases=[_event(span) for span in self._log.phases],
            transfers=[
                _transfer(transfer, transfer.completed)
                for transfer in self._transfers
                if transfer.completed is not None
            ],
        )


def _event(span: Span) -> TraceEvent:
    return TraceEvent(span.name, span.began, span.ended)


def _transfer(transfer: CountedTransfer, completed: float) -> TraceEvent:
    details = {
        "kind": transfer.kind,
        "bytes": transfer.bytes_sent + transfer.bytes_received,
        "bytes_sent": transfer.bytes_sent,
        "bytes_received": transfer.bytes_received,
        "messages": transfer.messages,
    }
    return TraceEvent(transfer.kind, transfer.began, completed, details)
