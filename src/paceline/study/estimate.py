"""How long cells will take, by those that are done."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from paceline.study.folder import Cell


def seconds_of(cell: Cell, cells: Iterable[Cell]) -> float | None:
    """The mean of its finished repeats, else of its part's cells, else of all; None: unknown."""
    timed = [other for other in cells if other.elapsed_seconds is not None]
    nearer = (
        [other for other in timed if other.group == cell.group],
        [other for other in timed if other.part == cell.part],
        timed,
    )
    for others in nearer:
        if others:
            return fmean(other.elapsed_seconds or 0.0 for other in others)
    return None


def seconds_of_all(cells: Iterable[Cell], known: Iterable[Cell]) -> float | None:
    """What `cells` will take together; None where nothing is known about one of them."""
    known = list(known)
    each = [seconds_of(cell, known) for cell in cells]
    told = [seconds for seconds in each if seconds is not None]
    return sum(told) if len(told) == len(each) else None


def as_clock(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
