"""Ctrl-C and termination signals while a worker trains."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stop_on_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Let a signal end the loop between iterations; another Ctrl-C, at once.

    Termination may be asked for again without haste: SLURM does so at a job's time limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_requested = False

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        if is_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not is_requested:
            is_requested = True
            request_stop(f"stopped by {signal.Signals(number).name}")

    before = [signal.signal(number, request) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
