"""A run as it goes on: what its workers have written since one last looked.

What watchers are sent, and when: the list whenever it changes, a run as it grows.

Lines of server-sent events. A stream ends when its run does, or when the server is to end: nobody
is kept waiting by a page that somebody left open."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from time import monotonic, time
from typing import Any

from starlette.concurrency import run_in_threadpool

from paceline.errors import RecordsError
from paceline.records import RunFolder, open_record
from paceline.report.shape import is_number
from paceline.ui.run_index import SILENT_SECONDS, RunIndex, newest_seconds

MOST_POINTS = 600
"""In one message: a page needs no more, however long the run was before it was opened."""
MOST_BYTES = 4_000_000
"""Read of a file at once: a long run is told in parts, and never held whole."""
MOST_WORKERS = 4
"""Whose phases are told; curves are the first one's."""

Point = list[float | None]


class Follower:
    """Reads the events of a run as they are appended; never the same line twice."""

    def __init__(self, path: Path) -> None:
        self._folder = RunFolder(path)
        self._workers = [_Worker(self._folder.events_file(rank)) for rank in range(MOST_WORKERS)]

    def news(self) -> dict[str, Any] | None:
        """What a page adds to what it shows; None where there is nothing new."""
        points: list[Point] = []
        news: dict[str, Any] = {}
        for rank, worker in enumerate(self._workers):
            for event in worker.new_events():
                kind = event.get("event")
                if kind == "iterations" and (phases := worker.phases_since(event.get("phases"))):
                    news.setdefault("phases", {})[str(rank)] = phases
                if rank:
                    continue
                if kind == "iterations":
                    points += _points(event)
                elif kind == "evaluation":
                    news.setdefault("evaluations", []).extend(_evaluation(event))
        if points:
            news["points"] = thinned(points)
        return news or None

    @property
    def is_behind(self) -> bool:
        """Whether there was more than one look takes in: the next one should follow at once."""
        return any(worker.is_behind for worker in self._workers)

    @property
    def is_over(self) -> bool:
        """Ended, or so long silent that nothing more is to be expected."""
        if self._folder.result_file.is_file():
            return True
        return time() - newest_seconds(self._folder.path) > SILENT_SECONDS

    def outcome(self) -> dict[str, str]:
        """How a run that is over ended: its status, and the cause."""
        try:
            result = self._folder.read_result()
        except RecordsError as error:
            return {"status": "damaged", "cause": str(error)}
        if result is None:
            return {"status": "interrupted", "cause": ""}
        return {key: str(result[key] or "") for key in ("status", "cause")}


class _Worker:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0
        self._phases_before: dict[str, float] = {}
        """At the end of the first block: what came before is mostly start-up."""
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
                contents = file.read(MOST_BYTES)
        except OSError:
            self.is_behind = False
            return []
        self.is_behind = len(contents) == MOST_BYTES
        # The last line may be half written. One that fills all that is read is no event.
        end = contents.rfind(b"\n") + 1
        self._offset += end or (MOST_BYTES if self.is_behind else 0)
        return contents[:end].splitlines()

    def phases_since(self, phases: Any) -> dict[str, float]:
        """What each has taken since the first block of the process that writes."""
        if not isinstance(phases, dict) or not all(map(is_number, phases.values())):
            return {}
        before = self._phases_before
        # A resumed run counts from zero again.
        if not before or any(spent < before.get(name, 0.0) for name, spent in phases.items()):
            self._phases_before = phases
            return {}
        return {name: spent - before.get(name, 0.0) for name, spent in phases.items()}


def _points(event: dict[str, Any]) -> list[Point]:
    """[iteration, loss, seconds] of a block; none where it has another shape."""
    first, seconds, losses = (event.get(key) for key in ("first", "seconds", "loss"))
    if not is_number(first) or not isinstance(seconds, list) or not isinstance(losses, list):
        return []
    return [
        [first + index + 1, loss if is_number(loss) else None, spent]
        for index, (loss, spent) in enumerate(zip(losses, seconds, strict=False))
        if is_number(spent)
    ]


def _evaluation(event: dict[str, Any]) -> list[Point]:
    """[iteration, accuracy]; none where it has another shape."""
    iteration, accuracy = event.get("iteration"), event.get("test_accuracy")
    return [[iteration, accuracy]] if is_number(iteration) and is_number(accuracy) else []


def thinned(points: list[Point]) -> list[Point]:
    """So many that a page can draw them; each the last of its stretch, with the stretch's means."""
    stride = -(-len(points) // MOST_POINTS)
    if stride <= 1:
        return points
    stretches = (points[begin : begin + stride] for begin in range(0, len(points), stride))
    return [[stretch[-1][0], _mean(stretch, 1), _mean(stretch, 2)] for stretch in stretches]


def _mean(stretch: list[Point], column: int) -> float | None:
    values = [value for point in stretch if (value := point[column]) is not None]
    return sum(values) / len(values) if values else None


LIST_SECONDS = 1.0
RUN_SECONDS = 0.4
"""How often records are looked at while somebody watches."""
IDLE_TIMES = 20
"""Looking takes at most one part in so many of a core, which the runs may need."""
KEEP_ALIVE_SECONDS = 15.0
CLOSING_SECONDS = 0.2
"""How often a stream asks whether the server is to end."""

IsClosing = Callable[[], bool]


async def list_changes(library: RunIndex, is_closing: IsClosing) -> AsyncIterator[str]:
    pulse = _Pulse(LIST_SECONDS, is_closing)
    before = ""
    while True:
        begin = monotonic()
        entries = await run_in_threadpool(library.entries)
        spent = monotonic() - begin
        now = json.dumps([entry.to_dict() for entry in entries])
        for line in pulse.lines(now if now != before else None):
            yield line
        before = now
        if not await pulse.wait(spent):
            return


async def run_changes(follower: Follower, is_closing: IsClosing) -> AsyncIterator[str]:
    pulse = _Pulse(RUN_SECONDS, is_closing)
    while True:
        # Asked before the last look, so that nothing written in between is missed.
        is_over = follower.is_over
        begin = monotonic()
        news = await run_in_threadpool(follower.news)
        spent = monotonic() - begin
        for line in pulse.lines(None if news is None else json.dumps(news)):
            yield line
        if follower.is_behind:
            continue
        if is_over:
            yield f"event: over\ndata: {json.dumps(follower.outcome())}\n\n"
            return
        if not await pulse.wait(spent):
            return


class _Pulse:
    """Waits between two looks, and says now and then that it is still there."""

    def __init__(self, seconds: float, is_closing: IsClosing) -> None:
        self._seconds = seconds
        self._is_closing = is_closing
        self._said = monotonic()

    def lines(self, data: Any) -> list[str]:
        if data is None and monotonic() - self._said < KEEP_ALIVE_SECONDS:
            return []
        self._said = monotonic()
        return [": still here\n\n" if data is None else f"data: {data}\n\n"]

    async def wait(self, looking_seconds: float) -> bool:
        """False as soon as the server is to end."""
        until = monotonic() + max(self._seconds, IDLE_TIMES * looking_seconds)
        while not self._is_closing():
            left = until - monotonic()
            if left <= 0:
                return True
            await asyncio.sleep(min(left, CLOSING_SECONDS))
        return False
