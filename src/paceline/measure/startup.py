"""Startup time of a worker, from the command to the first step.

Imports and launch (validation, machines, starting processes) end before the worker's phase clock
starts; the others follow, and the clock counts them as "other".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from paceline.measure.procfs import process_age_seconds

STARTUP_PARTS = ("imports", "launch", "rendezvous", "device", "data", "precision", "model")
SCRIPT_PARTS = ("imports", "preparation")
"""Of a profiled script: until torch is imported, and what it does from then to its first step."""
BEFORE_CLOCK = ("imports", "launch")
"""Parts that are not in the wall time."""
NEGLIGIBLE_SECONDS = 0.0005
"""Parts that take less are not shown."""

# Both belong to the process, because they precede the clock of a run; a forked worker inherits
# those of its launcher.
_import_seconds: list[float] = []
_began: list[float] = []


def begin_command() -> None:
    """Count from the start of this process, which may be a fork of one that has imported torch."""
    _import_seconds.clear()
    _began[:] = [perf_counter() - process_age_seconds()]


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
        """Start with `part`, counted from the start of the clock; imports and launch precede it."""
        self.seconds["imports"] = sum(_import_seconds)
        if _began:
            self.seconds["launch"] = max(0.0, self._since - _began[0] - self.seconds["imports"])
        _import_seconds.clear()
        _began.clear()
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
