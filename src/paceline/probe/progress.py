"""How far the measuring has come: a live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.probe.run import Show
from paceline.worker.display import COLUMNS_VARIABLE

QUIET_SECONDS = 10.0


@contextmanager
def showing(quiet: bool) -> Iterator[Show]:
    if quiet:
        yield lambda text, done, total: None
    elif COLUMNS_VARIABLE in os.environ or sys.stdout.isatty():
        with _live() as show:
            yield show
    else:
        yield _plainly()


@contextmanager
def _live() -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = os.environ.get(COLUMNS_VARIABLE)
    console = Console(
        highlight=False,
        markup=False,
        width=int(columns) if columns else None,
        force_terminal=True if columns else None,
    )
    # Refreshed only between sizes: a thread of its own would disturb what is measured.
    progress = Progress(
        BarColumn(bar_width=18),
        TextColumn("{task.description}"),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    task = progress.add_task("connecting ...", total=None)
    with progress:

        def show(text: str, done: int, total: int) -> None:
            progress.update(task, description=f"measuring {text}", completed=done, total=total)
            progress.refresh()

        yield show


def _plainly() -> Show:
    spoke = time.monotonic()

    def show(text: str, done: int, total: int) -> None:
        nonlocal spoke
        if time.monotonic() - spoke > QUIET_SECONDS:
            spoke = time.monotonic()
            sys.stdout.write(f"measuring {text} ({done} of {total} sizes done)\n")
            sys.stdout.flush()

    return show
