"""Timelines of `paceline profile --trace`.

Each rank adds its phases and steps to its event file. At the end, they are joined with the log of
collectives, which tells waiting from exchange, and written in the format of `paceline train`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.measure.trace_file import TraceEvent, merge_traces, write_trace
from paceline.profiler.collectives.communication import (
    Communication,
    RankCommunication,
    traffic_kinds,
)
from paceline.profiler.collectives.log import OPERATIONS
from paceline.records import RunFolder

if TYPE_CHECKING:
    from paceline.measure.phase_clock import PhaseClock, Span
    from paceline.profiler.collection import RankRecord
    from paceline.profiler.tracking.step_tracker import StepTracker

STEPS_MAX = 1000
"""As for `paceline train --trace`."""


class TraceLog:
    """Logs phases and steps of a rank, and adds them to its event file."""

    def __init__(self, tracker: StepTracker, first: int) -> None:
        """`first`: the first step to log."""
        self._tracker, self._first = tracker, first
        self._clock: PhaseClock | None = None
        """The one that is logged; the tracker may replace it in the first step."""
        self._first_logged = first
        self._is_closing = False
        self._seen = (0, 0)
        """How many phases and steps were logged when events were last due."""
        self._has_first_step = False
        """Whether the first step of the script was logged, and is not in the file yet."""
        if not first:
            self._start()

    def _start(self) -> None:
        self._clock = self._tracker.clock
        self._first_logged = self._tracker.steps
        self._has_first_step = not self._first_logged
        self._clock.start_log()

    def step(self) -> None:
        """Called after each step."""
        steps = self._tracker.steps
        if steps >= self._first and self._clock is not self._tracker.clock:
            self._start()
        elif steps == self._first_logged + STEPS_MAX:
            self._tracker.clock.stop_log()

    def close(self) -> None:
        """The next events are the last ones."""
        self._is_closing = True

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What was logged before these were last due: what follows may still be relabeled."""
        log = self._clock.log if self._clock is not None else None
        if log is None:
            return
        phases, steps = (len(log.phases), len(log.steps)) if self._is_closing else self._seen
        if phases:
            times = [_times(span) for span in log.steps[:steps]]
            if self._has_first_step and times:
                # With several optimizers, the first step ends more than once.
                parts = min(self._tracker.parts_of_first, len(times))
                times[:parts] = [[times[0][0], times[parts - 1][1]]]
                self._has_first_step = False
            values = {
                "first": self._first_logged,
                "phases": [[span.name, *_times(span)] for span in log.phases[:phases]],
                "steps": times,
            }
            yield "trace", values
        del log.phases[:phases], log.steps[:steps]
        self._seen = len(log.phases), len(log.steps)


def _times(span: Span) -> list[float]:
    return [round(span.began, 9), round(span.ended, 9)]


def write_traces(
    folder: RunFolder, ranks: Sequence[RankRecord], communication: Communication
) -> None:
    """Write the traces of all ranks that logged one."""
    for rank in ranks:
        logged = [event for event in rank.events if event["event"] == "trace"]
        steps = [TraceEvent("step", *times) for event in logged for times in event["steps"]]
        if not steps:
            continue
        phases = [TraceEvent(*values) for event in logged for values in event["phases"]]
        own, offset_seconds = communication.ranks.get(rank.rank), 0.0
        if own is not None:
            waited = own.waits.waited[rank.rank]
            waits = zip(waited.began.tolist(), waited.ended.tolist(), strict=True)
            phases = list(split_waits(phases, waits))
            began = np.array([steps[0].began])
            offset_seconds = float(own.waits.offsets.at(np.array([rank.rank]), began)[0])
        write_trace(
            folder.trace_file(rank.rank),
            rank.rank,
            int(rank.start["node"]),
            offset_seconds=offset_seconds,
            first_iteration=int(logged[0]["first"]),
            steps=steps,
            phases=list(merge_slices(phases, {step.ended for step in steps})),
            transfers=() if own is None else _transfers(own),
        )
    merge_traces(folder, [rank.rank for rank in ranks])


def merge_slices(
    phases: Iterable[TraceEvent], boundaries: Collection[float]
) -> Iterator[TraceEvent]:
    """Join slices of one phase that follow each other, except at the end of a step."""
    last: TraceEvent | None = None
    for phase in phases:
        if last is None:
            last = phase
        elif (phase.name, phase.began) == (last.name, last.ended) and last.ended not in boundaries:
            last = last._replace(ended=phase.ended)
        else:
            yield last
            last = phase
    if last is not None:
        yield last


def split_waits(
    phases: Iterable[TraceEvent], waits: Iterable[tuple[float, float]]
) -> Iterator[TraceEvent]:
    """Split `exchange` where ranks waited; phases and waits are in the order of time."""
    remaining = iter(waits)
    wait = next(remaining, None)
    for phase in phases:
        while wait is not None and wait[1] <= phase.began:
            wait = next(remaining, None)
        began = phase.began
        while phase.name == "exchange" and wait is not None and wait[0] < phase.ended:
            begin, end = max(began, wait[0]), min(phase.ended, wait[1])
            if begin > began:
                yield TraceEvent("exchange", began, begin)
            yield TraceEvent("wait", begin, end)
            began = end
            if wait[1] > phase.ended:
                break
            wait = next(remaining, None)
        if began < phase.ended:
            yield phase._replace(began=began)


def _transfers(own: RankCommunication) -> Iterator[TraceEvent]:
    records = own.log.records[own.log.records["end"] > 0]
    for record, kind in zip(records, traffic_kinds(records), strict=True):
        details = {
            name: int(record[name])
            for name in ("sequence", "bytes", "bytes_sent", "bytes_received", "messages")
        }
        yield TraceEvent(
            OPERATIONS[record["operation"]],
            float(record["arrival"]),
            float(record["end"]),
            {"kind": str(kind), "group": int(record["group"]), **details},
        )
