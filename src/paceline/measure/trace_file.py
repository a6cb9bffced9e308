"""Trace files: the steps, phases and transfers of a rank, and the merged trace of all ranks.

The files use the Trace Event Format, which Perfetto and chrome://tracing open. Each rank is one
process with a thread for its steps, one for its phases, and one or more for its transfers, because
events of one thread must not overlap. Times are in microseconds. Those of a rank's own file start
with its first traced step; additional keys allow aligning the files of several ranks:

    began_seconds          that start, on the clock of rank 0
    clock_offset_seconds   estimated offset that was added to the clock of this rank
    iterations             iteration number, ts and dur of each

The merged file has one clock: times start with the first traced step of any rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import RecordsError
from paceline.records import SCHEMA, RunFolder, is_number, read_json, write_json

THREADS_MAX = 1000
"""Perfetto identifies threads by number alone in places, takes number 0 for the main thread and
lists the main thread first. So rank r is process (r + 1) * 1000, its steps are the main thread, and
no two ranks have a thread number in common."""

STEPS_THREAD, PHASES_THREAD, FIRST_TRANSFERS_THREAD = 0, 1, 2


class TraceEvent(NamedTuple):
    """A time interval, in seconds of the clock of its rank."""

    name: str
    began: float
    ended: float
    details: Mapping[str, Any] = {}


def write_trace(
    path: Path,
    rank: int,
    node: int,
    *,
    offset_seconds: float,
    first_iteration: int,
    steps: Sequence[TraceEvent],
    phases: Iterable[TraceEvent],
    transfers: Iterable[TraceEvent],
) -> None:
    """Write the trace of a rank; phases and transfers that begin outside its steps are left out."""
    timeline = _Timeline(steps, first_iteration, rank)
    events = [*timeline.steps(), *timeline.phases(phases), *timeline.transfers(transfers)]
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
                for number, step in enumerate(steps, first_iteration)
            ],
            "displayTimeUnit": "ms",
            "traceEvents": timeline.names(events) + events,
        },
    )


def merge_traces(folder: RunFolder, ranks: Iterable[int]) -> None:
    """Write one trace of these ranks; nothing without any, and without those that are damaged."""
    traces = [trace for rank in ranks if (trace := _read(folder.trace_file(rank))) is not None]
    if not traces:
        return
    zero = min(began for began, _ in traces)
    events = [
        _shifted(event, round((began - zero) * 1e9)) for began, events in traces for event in events
    ]
    write_json(
        folder.merged_trace_file,
        {"schema": SCHEMA, "displayTimeUnit": "ms", "traceEvents": events},
    )


def _read(path: Path) -> tuple[float, list[dict[str, Any]]] | None:
    """Return start and events of a rank's trace; None if it is missing or damaged."""
    try:
        trace = read_json(path)
        began, events = trace["began_seconds"], trace["traceEvents"]
        if is_number(began) and all(is_number(event.get("ts", 0)) for event in events):
            return began, events
    except (RecordsError, AttributeError, LookupError, TypeError):
        pass
    return None


def _shifted(event: dict[str, Any], nanoseconds: int) -> dict[str, Any]:
    if "ts" not in event:
        return event
    return {**event, "ts": (round(event["ts"] * 1e3) + nanoseconds) / 1e3}


class _Timeline:
    def __init__(self, steps: Sequence[TraceEvent], first_iteration: int, rank: int) -> None:
        self._steps, self._first, self._rank = steps, first_iteration, rank
        self._process = (rank + 1) * THREADS_MAX

    def when(self, began: float, ended: float) -> dict[str, float]:
        # Both ends are rounded to nanoseconds, the resolution of the clock, so that an event that
        # begins at the end of another one does not overlap with it.
        zero = self._steps[0].began
        begin, end = round((began - zero) * 1e9), round((ended - zero) * 1e9)
        return {"ts": begin / 1e3, "dur": (end - begin) / 1e3}

    def _covers(self, moment: float) -> bool:
        return self._steps[0].began <= moment < self._steps[-1].ended

    def steps(self) -> list[dict[str, Any]]:
        return [
            self._event("step", step._replace(name=f"step {number}"), STEPS_THREAD)
            for number, step in enumerate(self._steps, self._first)
        ]

    def phases(self, phases: Iterable[TraceEvent]) -> list[dict[str, Any]]:
        return [
            self._event("phase", phase, PHASES_THREAD)
            for phase in phases
            if self._covers(phase.began)
        ]

    def transfers(self, transfers: Iterable[TraceEvent]) -> list[dict[str, Any]]:
        """Place each transfer on the first free thread."""
        events = []
        busy_until: list[float] = []
        for transfer in sorted(transfers, key=attrgetter("began")):
            if not self._covers(transfer.began):
                continue
            free = (n for n, until in enumerate(busy_until) if until <= transfer.began)
            lane = next(free, len(busy_until))
            busy_until[lane : lane + 1] = [transfer.ended]
            events.append(self._event("transfer", transfer, FIRST_TRANSFERS_THREAD + lane))
        return events

    def _event(self, category: str, event: TraceEvent, thread: int) -> dict[str, Any]:
        return {
            "name": event.name,
            "cat": category,
            "ph": "X",
            "pid": self._process,
            "tid": self._process + thread,
            **self.when(event.began, event.ended),
            "args": {**event.details, "iteration": self._iteration_at(event.began)},
        }

    def _iteration_at(self, moment: float) -> int | None:
        """Return the iteration at a time; None between iterations."""
        index = bisect_right(self._steps, moment, key=attrgetter("began")) - 1
        is_within = index >= 0 and moment < self._steps[index].ended
        return self._first + index if is_within else None

    def names(self, events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return metadata events with the names of the rank and its threads."""
        names = {STEPS_THREAD: "steps", PHASES_THREAD: "phases"}
        named = [("process_name", self._process, f"rank {self._rank}")]
        named += [
            ("thread_name", thread, names.get(thread - self._process, "transfers"))
            for thread in sorted({event["tid"] for event in events})
        ]
        return [
            {"name": what, "ph": "M", "pid": self._process, "tid": thread, "args": {"name": name}}
            for what, thread, name in named
        ]
