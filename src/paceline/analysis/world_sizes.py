"""The world sizes of a run: workers can be lost or join."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.analysis.validation import is_number
from paceline.records import Result


@dataclass(frozen=True, slots=True)
class WorldSize:
    begin: int
    """The first iteration with this world size."""
    workers: int


def worlds_of(starts: Iterable[tuple[int, int]]) -> list[WorldSize]:
    """From the starts of a run, each with its first iteration and its world size.

    Iterations that a start repeats no longer count for the world size before it.
    """
    kept: list[WorldSize] = []
    for begin, workers in starts:
        while kept and kept[-1].begin >= begin:
            kept.pop()
        if not kept or kept[-1].workers != workers:
            kept.append(WorldSize(begin, workers))
    return kept


def starts_of_result(result: Result | None) -> list[tuple[int, int]]:
    """The starts of an elastic run, from its result."""
    worlds = (result or {}).get("worlds")
    found = [one for one in worlds if isinstance(one, dict)] if isinstance(worlds, list) else []
    keys = ("iteration", "workers")
    known = [world for world in found if all(is_number(world.get(key)) for key in keys)]
    return [(int(world["iteration"]), int(world["workers"])) for world in known]
