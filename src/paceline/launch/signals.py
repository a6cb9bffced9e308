"""Ctrl-C and termination signals in launchers; the training loop has its own handlers."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self

from paceline.errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""The signals that stop a run."""


def signal_name(exit_code: int) -> str:
    """The name of the signal that a negative exit code stands for; some have only numbers."""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def describe_exit(process: str, exit_code: int, last_line: str) -> str:
    """Why a process failed that reported no error; `last_line` is the last line of its output."""
    if exit_code < 0:
        return f"{process} was killed by {signal_name(exit_code)}"
    return f"{process} ended with exit code {exit_code}: {last_line or 'no output'}"


class SignalMonitor:
    """Records signals; while `raise_on_signal` is set, a signal raises StoppedError."""

    def __init__(self, before: str = "training") -> None:
        """`before`: what has not begun while `raise_on_signal` is set, for the error message."""
        self.raise_on_signal = True
        self._activity = before
        self.received: list[signal.Signals] = []

    def __enter__(self) -> Self:
        self._previous_handlers = []
        # Python allows handlers only in the main thread.
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = [signal.signal(number, self._receive) for number in SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(SIGNALS, self._previous_handlers, strict=False):
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if self.raise_on_signal:
            raise StoppedError(f"stopped by {self.received[0].name} before {self._activity} began")
