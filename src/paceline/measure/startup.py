"""What a worker does before its first iteration, and how long each part takes.

The phase clock counts all of it as "other", except for imports, which end before the clock starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

STARTUP_PARTS = ("imports", "rendezvous", "data", "model")

_import_seconds: list[float] = []
"""Of this process; modules are imported before there is a run whose clock could count it."""


@contextmanager
def importing() -> Iterator[None]:
    """Time imports, for the next run of this process."""
    began = perf_counter()
    try:
        yield
    finally:
        _import_seconds.append(perf_counter() - began)


class StartupTimer:
    """Counts seconds under one part at a time, from `begin` to `end`, without gaps."""

    def __init__(self, started: float) -> None:
        self.seconds = dict.fromkeys(STARTUP_PARTS, 0.0)
        self._since = started
        self._part: str | None = None

    def begin(self, part: str) -> None:
        """Count from the start of the clock, as `part`; imports are those since the last run."""
        self.seconds["imports"] = sum(_import_seconds)
        _import_seconds.clear()
        self._part = part

    def enter(self, part: str) -> None:
        """End the current part, begin `part`; nothing is counted before `begin` or after `end`."""
        if self._part is not None:
            self._count()
            self._part = part

    def end(self) -> None:
        """Stop counting: the first iteration begins, or the worker failed before it."""
        if self._part is not None:
            self._count()
            self._part = None

    def _count(self) -> None:
        assert self._part is not None
        now = perf_counter()
        self.seconds[self._part] += now - self._since
        self._since = now
