"""A run as it goes on: what its first worker has written since one last looked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from time import time
from typing import Any

from paceline.records import RunFolder
from paceline.ui.library import SILENT_SECONDS, newest_seconds

MOST_POINTS = 600
"""In one message: a page needs no more, however long the run was before it was opened."""


class Follower:
    """Reads the events of a run as they are appended; never the same line twice."""

    def __init__(self, path: Path) -> None:
        self._folder = RunFolder(path)
        self._file = self._folder.events_file(0)
        self._offset = 0
        self._phases_before: dict[str, float] = {}
        """At the end of the first block: what came before is mostly start-up."""

    def news(self) -> dict[str, Any] | None:
        """What a page adds to what it shows; None where there is nothing new."""
        points: list[list[float | None]] = []
        news: dict[str, Any] = {}
        for event in self._new_events():
            kind = event.get("event")
            if kind == "iterations":
                points += _points(event)
                if phases := self._phases(event.get("phases")):
                    news["phases"] = phases
            elif kind == "evaluation":
                keys = ("iteration", "test_accuracy", "test_loss")
                news.setdefault("evaluations", []).append([event.get(key) for key in keys])
            elif kind in ("start", "end"):
                news[kind] = event
        if points:
            news["points"] = thinned(points)
        return news or None

    def _phases(self, phases: Any) -> dict[str, float]:
        """What each has taken since the first block of the process that writes."""
        if not isinstance(phases, dict) or not all(
            isinstance(spent, int | float) for spent in phases.values()
        ):
            return {}
        before = self._phases_before
        # A resumed run counts from zero again.
        if not before or any(spent < before.get(name, 0.0) for name, spent in phases.items()):
            self._phases_before = phases
            return {}
        return {name: spent - before.get(name, 0.0) for name, spent in phases.items()}

    @property
    def is_over(self) -> bool:
        """Ended, or so long silent that nothing more is to be expected."""
        if self._folder.result_file.is_file():
            return True
        return time() - newest_seconds(self._folder.path) > SILENT_SECONDS

    def _new_events(self) -> Iterator[dict[str, Any]]:
        try:
            with self._file.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                contents = file.read()
        except OSError:
            return
        # The last line may be half written.
        end = contents.rfind(b"\n") + 1
        self._offset += end
        for line in contents[:end].splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event


def _points(event: dict[str, Any]) -> list[list[float | None]]:
    """[iteration, loss, seconds] of a block; none where it has another shape."""
    first, seconds, losses = (event.get(key) for key in ("first", "seconds", "loss"))
    if not isinstance(first, int) or not isinstance(seconds, list) or not isinstance(losses, list):
        return []
    return [
        [first + index + 1, loss, spent]
        for index, (loss, spent) in enumerate(zip(losses, seconds, strict=False))
    ]


def thinned(points: list[list[float | None]]) -> list[list[float | None]]:
    """So many that a page can draw them; each the last of its stretch, with the stretch's means."""
    stride = -(-len(points) // MOST_POINTS)
    if stride <= 1:
        return points
    stretches = (points[begin : begin + stride] for begin in range(0, len(points), stride))
    return [[stretch[-1][0], _mean(stretch, 1), _mean(stretch, 2)] for stretch in stretches]


def _mean(stretch: list[list[float | None]], column: int) -> float | None:
    values = [value for point in stretch if isinstance(value := point[column], int | float)]
    return sum(values) / len(values) if values else None
