"""Progress of a benchmark: a live line on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.training.display import COLUMNS_VARIABLE

QUIET_SECONDS = 10.0
"""Minimum interval between lines where there is no terminal."""
_CLEAR_LINE = "\r\x1b[2K"

ShowProgress = Callable[[str, int, int], None]
"""Receives what is measured next, the number of sizes done, and the total."""


@contextmanager
def progress_display(quiet: bool) -> Iterator[ShowProgress]:
    """Updates only between sizes, because a display thread would disturb the measurement."""
    if quiet:
        yield lambda text, done, total: None
    elif _is_live():
        yield lambda text, done, total: _write(f"{_CLEAR_LINE}{_describe(text, done, total)}")
        clear_line()
    else:
        yield _occasional_lines()


def clear_line() -> None:
    """Clear the live line, which a killed process leaves behind."""
    if _is_live():
        _write(_CLEAR_LINE)


def _is_live() -> bool:
    return COLUMNS_VARIABLE in os.environ or sys.stdout.isatty()


def _occasional_lines() -> ShowProgress:
    last_shown = time.monotonic()

    def show(text: str, done: int, total: int) -> None:
        nonlocal last_shown
        if time.monotonic() - last_shown > QUIET_SECONDS:
            last_shown = time.monotonic()
            _write(f"{_describe(text, done, total)}\n")

    return show


def _describe(text: str, done: int, total: int) -> str:
    return f"measuring {text} ({done} of {total} sizes done)"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
