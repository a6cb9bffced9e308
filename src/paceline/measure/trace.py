"""Trace of selected iterations: start and end of each phase and each transfer.

The file uses the Trace Event Format, which Perfetto and chrome://tracing open. Each worker is one
process: thread 0 holds the phases, thread 1 the transfers, and threads 2 and up hold concurrent
transfers, because events of one thread must not overlap. Times are in microseconds since the start
of the first traced iteration. Additional keys allow aligning the traces of several workers:

    began_seconds          that start, on the clock of rank 0
    clock_offset_seconds   estimated offset that was added to the clock of this worker
    iterations             iteration number, ts and dur of each
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

from paceline.measure.kernel_time import KernelTimer
from paceline.measure.phase_clock import PhaseClock, PhaseLog, Span
from paceline.measure.traffic import CountedTransfer, Traffic
from paceline.records import SCHEMA, write_json

WARM_UP_ITERATIONS = 10
"""Skipped if the run has enough iterations, because the first ones include warm-up."""

PHASES_THREAD, FIRST_TRANSFERS_THREAD = 0, 1


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
        steps = self._log.steps
        timeline = _Timeline(steps, self._first, rank)
        events = timeline.phases(self._log.phases) + timeline.transfers(self._transfers)
        write_json(
            path,
            {
                "schema": SCHEMA,
                "rank": rank,
                "node": node,
                "began_seconds": steps[0].began + offset_seconds,
                "clock_offset_seconds": offset_seconds,
                "iterations": [
                    {"iteration": number, **timeline.when(step.began, step.ended)}
                    for number, step in enumerate(steps, self._first)
                ],
                "displayTimeUnit": "ms",
                "traceEvents": timeline.names(events) + events,
            },
        )


class _Timeline:
    def __init__(self, steps: list[Span], first: int, rank: int) -> None:
        self._steps, self._first, self._rank = steps, first, rank

    def when(self, began: float, ended: float) -> dict[str, float]:
        zero = self._steps[0].began
        # Nanoseconds, the resolution of the clock.
        return {
            "ts": round((began - zero) * 1e6, 3),
            "dur": round((ended - began) * 1e6, 3),
        }

    def _covers(self, moment: float) -> bool:
        return self._steps[0].began <= moment < self._steps[-1].ended

    def phases(self, spans: Iterable[Span]) -> list[dict[str, Any]]:
        return [
            self._event("phase", span, PHASES_THREAD, {})
            for span in spans
            if self._covers(span.began)
        ]

    def transfers(self, transfers: Iterable[CountedTransfer]) -> list[dict[str, Any]]:
        """Place each transfer on the first free thread."""
        events = []
        busy_until: list[float] = []
        for transfer in sorted(transfers, key=attrgetter("began")):
            if transfer.completed is None or not self._covers(transfer.began):
                continue
            free = (n for n, until in enumerate(busy_until) if until <= transfer.began)
            lane = next(free, len(busy_until))
            busy_until[lane : lane + 1] = [transfer.completed]
            details = {
                "kind": transfer.kind,
                "bytes": transfer.bytes_sent + transfer.bytes_received,
                "bytes_sent": transfer.bytes_sent,
                "bytes_received": transfer.bytes_received,
                "messages": transfer.messages,
            }
            span = Span(transfer.kind, transfer.began, transfer.completed)
            events.append(self._event("transfer", span, FIRST_TRANSFERS_THREAD + lane, details))
        return events

    def _event(
        self, category: str, span: Span, thread: int, details: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "name": span.name,
            "cat": category,
            "ph": "X",
            "pid": self._rank,
            "tid": thread,
            **self.when(span.began, span.ended),
            "args": {**details, "iteration": self._iteration_at(span.began)},
        }

    def _iteration_at(self, moment: float) -> int | None:
        """Return the iteration at a time; None between iterations."""
        index = bisect_right(self._steps, moment, key=attrgetter("began")) - 1
        is_within = index >= 0 and moment < self._steps[index].ended
        return self._first + index if is_within else None

    def names(self, events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return metadata events with the names of the worker and its threads."""
        named = [("process_name", PHASES_THREAD, f"rank {self._rank}")]
        for thread in sorted({event["tid"] for event in events}):
            name = "phases" if thread == PHASES_THREAD else "transfers"
            named.append(("thread_name", thread, name))
        return [
            {"name": what, "ph": "M", "pid": self._rank, "tid": thread, "args": {"name": name}}
            for what, thread, name in named
        ]
