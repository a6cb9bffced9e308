"""How long the training thread slept lately.

A thread that waits for another rank sleeps. One that computes needs the CPU, or is ready to run and
has no core.
"""

from __future__ import annotations

from pathlib import Path
from threading import get_ident
from time import perf_counter, thread_time

INTERVAL_SECONDS = 0.1
"""Reading takes about 20 us. The steps of a second are interpreted at once."""
SCHEDULER_FILE = Path("/proc/thread-self/schedstat")


class SleepTime:
    """Of the thread that creates it."""

    def __init__(self) -> None:
        self._thread = get_ident()
        self._moment, self._awake = perf_counter(), _awake_seconds()
        self._slept = 0.0

    def refresh(self) -> None:
        """Steps end; call this before `take`."""
        if perf_counter() - self._moment > INTERVAL_SECONDS:
            self._slept = self._since_last()

    def take(self, seconds: float, usual: float = 0.0) -> float:
        """How much of a time that was noted lately the thread may have slept, which is known once.

        `usual`: how long it slept besides. 0 in another thread.
        """
        self._slept = max(0.0, self._slept + self._since_last() - usual)
        taken = min(seconds, self._slept)
        self._slept -= taken
        return taken

    def _since_last(self) -> float:
        if get_ident() != self._thread:
            return 0.0
        moment, awake = perf_counter(), _awake_seconds()
        slept = (moment - self._moment) - (awake - self._awake)
        self._moment, self._awake = moment, awake
        return max(0.0, slept)


def _awake_seconds() -> float:
    """Of this thread: with a core, and waiting for one, if the kernel reports it."""
    try:
        queued = int(SCHEDULER_FILE.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        queued = 0.0
    return thread_time() + queued
