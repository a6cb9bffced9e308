"""How far the measuring has come: a live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.training.display import COLUMNS_VARIABLE

QUIET_SECONDS = 10.0
_CLEAR_LINE = "\r\x1b[2K"

Show = Callable[[str, int, int], None]
"""Told what comes next, how many sizes are done, and of how many."""


@contextmanager
def showing(quiet: bool) -> Iterator[Show]:
    """Shown only between sizes: a thread of its own would disturb what is measured."""
    if quiet:
        yield lambda text, done, total: None
    elif _is_live():
        yield lambda text, done, total: _write(f"{_CLEAR_LINE}{_describe(text, done, total)}")
        clear()
    else:
        yield _now_and_then()


def clear() -> None:
    """Take away a live line, perhaps that of a process that could not do so itself."""
    if _is_live():
        _write(_CLEAR_LINE)


def _is_live() -> bool:
    return COLUMNS_VARIABLE in os.environ or sys.stdout.isatty()


def _now_and_then() -> Show:
    spoke = time.monotonic()

    def show(text: str, done: int, total: int) -> None:
        nonlocal spoke
        if time.monotonic() - spoke > QUIET_SECONDS:
            spoke = time.monotonic()
            _write(f"{_describe(text, done, total)}\n")

    return show


def _describe(text: str, done: int, total: int) -> str:
    return f"measuring {text} ({done} of {total} sizes done)"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
