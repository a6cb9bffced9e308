"""Live updates as server-sent events: the list of runs as it changes, a run as it progresses.

`Follower` reads what the workers of a run have written since the last read. A stream ends when its
run ends or the server shuts down, so an open page never delays the shutdown.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from time import monotonic, time
from typing import Any

from starlette.concurrency import run_in_threadpool

from paceline.analysis.validation import is_number
from paceline.errors import RecordsError
from paceline.records import RunFolder, open_record
from paceline.ui.run_index import SILENT_SECONDS, RunIndex, newest_seconds
from paceline.ui.script_state import ScriptState

MAX_POINTS = 600
"""Per message: enough for a page, however long the run is."""
MAX_BYTES = 4_000_000
"""Read from a file at once: a long run is sent in parts and never held in memory."""
MAX_WORKERS = 4
"""Workers whose phases are sent; curves come from rank 0."""

LIST_SECONDS = 1.0
RUN_SECONDS = 0.4
"""Polling intervals while a page is open."""
IDLE_RATIO = 20
"""Reading takes at most 1/20 of a core, because the runs may need it."""
KEEP_ALIVE_SECONDS = 15.0
CLOSING_SECONDS = 0.2
"""Interval at which a stream checks whether the server is shutting down."""

Point = list[float | None]
IsClosing = Callable[[], bool]


class Follower:
    """Reads the events of a run as they are appended, each line once."""

    def __init__(self, path: Path) -> None:
        self._folder = RunFolder(path)
        self._workers = [_Worker(self._folder.events_file(rank)) for rank in range(MAX_WORKERS)]
        self._script = ScriptState(path)

    def read_update(self) -> dict[str, Any] | None:
        """New data for the page; None if there is none."""
        points: list[Point] = []
        update: dict[str, Any] = {}
        for rank, worker in enumerate(self._workers):
            for event in worker.new_events():
                kind = event.get("event")
                if kind == "iterations" and (phases := worker.phases_since(event.get("phases"))):
                    update.setdefault("phases", {})[str(rank)] = phases
                if rank:
                    continue
                if kind == "iterations":
                    points += _points(event)
                elif kind == "evaluation":
                    update.setdefault("evaluations", []).extend(_evaluation(event))
        if points:
            update["points"] = downsample(points)
        if not self.is_behind:
            update |= self._script.read_update()
        return update or None

    @property
    def is_behind(self) -> bool:
        """Whether more data is available than the last read returned."""
        return any(worker.is_behind for worker in self._workers)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, or has been silent for so long that it counts as ended."""
        if self._folder.result_file.is_file():
            return True
        return time() - newest_seconds(self._folder.path) > SILENT_SECONDS

    def outcome(self) -> dict[str, str]:
        """Status and cause of a run that has ended."""
        try:
            result = self._folder.read_result()
        except RecordsError as error:
            return {"status": "damaged", "cause": str(error)}
        if result is None:
            return {"status": "interrupted", "cause": ""}
        return {key: str(result[key] or "") for key in ("status", "cause")}


class _Worker:
    """The event file of one worker."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0
        self._phases_before: dict[str, float] = {}
        """Totals at the end of the first block, which is mostly startup."""
        self.is_behind = False

    def new_events(self) -> Iterator[dict[str, Any]]:
        for line in self._new_lines():
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event

    def _new_lines(self) -> list[bytes]:
        try:
            with open_record(self._file) as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                contents = file.read(MAX_BYTES)
        except OSError:
            self.is_behind = False
            return []
        self.is_behind = len(contents) == MAX_BYTES
        # The last line may be incomplete. A line longer than the limit is not an event: skip it.
        end = contents.rfind(b"\n") + 1
        self._offset += end or (MAX_BYTES if self.is_behind else 0)
        return contents[:end].splitlines()

    def phases_since(self, phases: Any) -> dict[str, float]:
        """Seconds in each phase since the first block of the current process."""
        if not isinstance(phases, dict) or not all(map(is_number, phases.values())):
            return {}
        before = self._phases_before
        # A resumed run starts counting at zero.
        if not before or any(spent < before.get(name, 0.0) for name, spent in phases.items()):
            self._phases_before = phases
            return {}
        return {name: spent - before.get(name, 0.0) for name, spent in phases.items()}


def _points(event: dict[str, Any]) -> list[Point]:
    """[iteration, loss, seconds] for each iteration of a block; empty if it is malformed."""
    first, seconds = event.get("first"), event.get("seconds")
    if not is_number(first) or not isinstance(seconds, list):
        return []
    losses = event.get("loss", [None] * len(seconds))
    if not isinstance(losses, list):
        return []
    return [
        [first + index + 1, loss if is_number(loss) else None, spent]
        for index, (loss, spent) in enumerate(zip(losses, seconds, strict=False))
        if is_number(spent)
    ]


def _evaluation(event: dict[str, Any]) -> list[tuple[float, dict[str, float]]]:
    """(iteration, figures of the test set by name); empty if the event is malformed."""
    iteration, metrics = event.get("iteration"), event.get("metrics")
    figures = {
        "accuracy": event.get("test_accuracy"),
        **(metrics if isinstance(metrics, dict) else {}),
        "loss": event.get("test_loss"),
    }
    known = {name: value for name, value in figures.items() if is_number(value)}
    return [(iteration, known)] if is_number(iteration) and known else []


def downsample(points: list[Point]) -> list[Point]:
    """At most MAX_POINTS points, each with the last iteration and the means of its interval."""
    stride = -(-len(points) // MAX_POINTS)
    if stride <= 1:
        return points
    intervals = (points[begin : begin + stride] for begin in range(0, len(points), stride))
    return [[interval[-1][0], _mean(interval, 1), _mean(interval, 2)] for interval in intervals]


def _mean(interval: list[Point], column: int) -> float | None:
    values = [value for point in interval if (value := point[column]) is not None]
    return sum(values) / len(values) if values else None


async def list_changes(index: RunIndex, is_closing: IsClosing) -> AsyncIterator[str]:
    timer = _StreamTimer(LIST_SECONDS, is_closing)
    before = ""
    while True:
        begin = monotonic()
        entries = await run_in_threadpool(index.entries)
        spent = monotonic() - begin
        now = json.dumps([entry.to_dict() for entry in entries])
        for line in timer.lines(now if now != before else None):
            yield line
        before = now
        if not await timer.wait(spent):
            return


async def run_changes(follower: Follower, is_closing: IsClosing) -> AsyncIterator[str]:
    timer = _StreamTimer(RUN_SECONDS, is_closing)
    while True:
        # Checked before the last read, so that nothing written in between is missed.
        is_over = follower.is_over
        begin = monotonic()
        update = await run_in_threadpool(follower.read_update)
        spent = monotonic() - begin
        for line in timer.lines(None if update is None else json.dumps(update)):
            yield line
        if follower.is_behind:
            continue
        if is_over:
            yield f"event: over\ndata: {json.dumps(follower.outcome())}\n\n"
            return
        if not await timer.wait(spent):
            return


class _StreamTimer:
    """Waits between reads, and sends keep-alive comments."""

    def __init__(self, seconds: float, is_closing: IsClosing) -> None:
        self._seconds = seconds
        self._is_closing = is_closing
        self._last_sent = monotonic()

    def lines(self, data: Any) -> list[str]:
        if data is None and monotonic() - self._last_sent < KEEP_ALIVE_SECONDS:
            return []
        self._last_sent = monotonic()
        return [": keep-alive\n\n" if data is None else f"data: {data}\n\n"]

    async def wait(self, reading_seconds: float) -> bool:
        """Wait until the next read is due; False if the server is shutting down."""
        until = monotonic() + max(self._seconds, IDLE_RATIO * reading_seconds)
        while not self._is_closing():
            left = until - monotonic()
            if left <= 0:
                return True
            await asyncio.sleep(min(left, CLOSING_SECONDS))
        return False
