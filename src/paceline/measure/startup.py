"""Startup time of a worker: imports, rendezvous, data and model, before the first step.

The phase clock counts all of it as "other", except for imports, which end before the clock starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

STARTUP_PARTS = ("imports", "rendezvous", "data", "model")

_import_seconds: list[float] = []
"""Imports of this process happen before the clock of a run exists."""


@contextmanager
def importing() -> Iterator[None]:
    """Measure imports for the next run of this process."""
    began = perf_counter()
    try:
        yield
    finally:
        _import_seconds.append(perf_counter() - began)


class StartupTimer:
    """Assigns the time from `begin` to `end` to one part at a time, without gaps."""

    def __init__(self, started: float) -> None:
        self.seconds = dict.fromkeys(STARTUP_PARTS, 0.0)
        self._since = started
        self._part: str | None = None

    def begin(self, part: str) -> None:
        """Start with `part`, counted from the start of the clock; collects pending import times."""
        self.seconds["imports"] = sum(_import_seconds)
        _import_seconds.clear()
        self._part = part

    def enter(self, part: str) -> None:
        """End the current part and begin `part`; no effect before `begin` or after `end`."""
        if self._part is not None:
            self._count()
            self._part = part

    def end(self) -> None:
        """Stop when the first step begins, or when the worker fails before it."""
        if self._part is not None:
            self._count()
            self._part = None

    def _count(self) -> None:
        assert self._part is not None
        now = perf_counter()
        self.seconds[self._part] += now - self._since
        self._since = now
