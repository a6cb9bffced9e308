"""Ctrl-C and termination signals outside the training loop, which has its own way with them."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self

from paceline.errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""The signals that stop a run."""


def signal_name(exit_code: int) -> str:
    """Of what ended a process with a code below zero; some signals have numbers only."""
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
    """Notes the signals that come; while `raise_on_signal` is set, one ends what is being done."""

    def __init__(self, before: str = "training") -> None:
        """`before`: what has not begun yet while `raise_on_signal` is set."""
        self.raise_on_signal = True
        self._before_what = before
        self.received: list[signal.Signals] = []

    def __enter__(self) -> Self:
        self._before = []
        # Elsewhere Python does not allow it; the main thread then decides about signals.
        if threading.current_thread() is threading.main_thread():
            self._before = [signal.signal(number, self._receive) for number in SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(SIGNALS, self._before, strict=False):
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if self.raise_on_signal:
            raise StoppedError(
                f"stopped by {self.received[0].name} before {self._before_what} began"
            )
