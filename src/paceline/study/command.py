"""A cell as a command of its own: its words, and a process that can be stopped.

A process for each cell, so that one that crashes, hangs or leaks takes nothing with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from paceline.config import RunConfig, values_to_type, words_of

STOP_SECONDS = 60.0
"""What a run gets to write its last checkpoint and its account when it is asked to stop."""
POLL_SECONDS = 0.2

_TRAIN = ("-m", "paceline", "train", "--quiet")
"""What Python is given, so that it is the Python and the paceline of this process."""


def train_words(config: RunConfig) -> list[str]:
    """Python's arguments for `paceline train` with this config."""
    return [*_TRAIN, *words_of(values_to_type(config))]


def resume_words(folder: Path) -> list[str]:
    return [*_TRAIN, "--resume", str(folder)]


class CellProcess:
    """A Python program whose output goes to a file; it does not outlive this process."""

    def __init__(self, words: list[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        tied = [sys.executable, "-m", "paceline.study.tied", str(os.getpid())]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*tied, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # In a group of its own: Ctrl-C reaches this process alone, which passes it on once.
                start_new_session=True,
                # The study's lock is the only one that may be inherited.
                close_fds=False,
            )

    def wait(self, limit_seconds: float, tick: Callable[[float], None]) -> int | None:
        """The exit code, or None where the limit passed; `tick` is told the seconds so far."""
        begin = time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(POLL_SECONDS)
            spent = time.monotonic() - begin
            if spent > limit_seconds:
                return None
            tick(spent)

    def stop(self) -> None:
        """Ask the run to stop, and end it where it does not; nothing of it is left."""
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_SECONDS)
        finally:
            # The whole group: a second Ctrl-C comes through here as well.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def last_words(log: Path) -> str:
    """What a command's output gives as the reason of its failure, in a line; may be empty."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    mark = "paceline: error: "
    told = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
    said = told or [line.strip() for line in lines if line.strip()][-1:]
    return said[0][:300] if said else ""
