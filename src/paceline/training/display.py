"""Progress display of a run: a live status line on terminals, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

COLUMNS_VARIABLE = "PACELINE_COLUMNS"
"""Width of the terminal if another process displays the output of this one."""
COLUMNS = "   epoch  rank test loss test acc         lr    wall s  samples/s"
MAX_BAR_COLUMNS = 18
MAX_FIXED_LOSS = 1e4
"""Larger losses do not fit the column with four decimals."""


@dataclass(slots=True)
class Status:
    """Status of training between two evaluations."""

    iteration: int
    iterations: int
    loss: float
    learning_rate: float
    samples_per_second: float
    accuracy: float | None
    seconds_left: float


class Display(Protocol):
    def update(self, status: Status) -> None:
        """Show the status; called about twice per second."""

    def evaluation(self, entry: dict[str, Any]) -> None:
        """Print one row: epoch, rank, loss, accuracy, learning rate, wall time and throughput."""

    def say(self, text: str) -> None:
        """Print a permanent line."""

    def close(self) -> None: ...


class SilentDisplay:
    def update(self, status: Status) -> None: ...
    def evaluation(self, entry: dict[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class PlainDisplay:
    """Lines for a log file; between evaluations a status line every `quiet_seconds`."""

    def __init__(self, out: TextIO | None = None, quiet_seconds: float = 10.0) -> None:
        self._out = out or sys.stdout
        self._quiet_seconds = quiet_seconds
        self._last_output = time.monotonic()
        self._has_header = False

    def update(self, status: Status) -> None:
        if time.monotonic() - self._last_output >= self._quiet_seconds:
            self.say(_describe(status))

    def evaluation(self, entry: dict[str, Any]) -> None:
        if not self._has_header:
            self.say(COLUMNS)
            self._has_header = True
        self.say(_row(entry))

    def say(self, text: str) -> None:
        self._last_output = time.monotonic()
        self._out.write(text + "\n")
        self._out.flush()

    def close(self) -> None: ...


class LiveDisplay:
    """Rows as in PlainDisplay, with a live status line and progress bar below.

    Refreshes only when the loop reports: a refresh thread would compete with training for a core.
    """

    def __init__(self, width: int | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        is_terminal = True if COLUMNS_VARIABLE in os.environ else None
        self._console = Console(
            highlight=False, markup=False, width=width, force_terminal=is_terminal
        )
        self._bar = BarColumn(bar_width=MAX_BAR_COLUMNS)
        self._progress = Progress(
            self._bar,
            TextColumn("{task.description}"),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("starting ...", total=None)
        self._progress.start()
        self._progress.refresh()
        self._has_header = False

    def update(self, status: Status) -> None:
        text = _describe(status)
        # The bar shrinks to leave room for the text and a space.
        columns_left = self._console.width - len(text) - 1
        self._bar.bar_width = min(MAX_BAR_COLUMNS, max(1, columns_left))
        self._progress.update(
            self._task, total=status.iterations, completed=status.iteration, description=text
        )
        self._progress.refresh()

    def evaluation(self, entry: dict[str, Any]) -> None:
        if not self._has_header:
            self._console.print(COLUMNS, style="bold")
            self._has_header = True
        self._console.print(_row(entry))

    def say(self, text: str) -> None:
        self._console.print(text, style="yellow", soft_wrap=True)

    def close(self) -> None:
        self._progress.update(self._task, visible=False)
        self._progress.stop()


def open_display(quiet: bool = False) -> Display:
    if quiet:
        return SilentDisplay()
    if columns := os.environ.get(COLUMNS_VARIABLE):
        return LiveDisplay(int(columns))
    return LiveDisplay() if sys.stdout.isatty() else PlainDisplay()


def _describe(status: Status) -> str:
    accuracy = "" if status.accuracy is None else f" acc {status.accuracy:.4f}"
    left = _duration(status.seconds_left)
    return (
        f"{status.iteration}/{status.iterations} loss {_loss(status.loss)}{accuracy}"
        f" lr {status.learning_rate:.2g} {status.samples_per_second:,.0f} samples/s {left} left"
    )


def _row(entry: dict[str, Any]) -> str:
    return (
        f"{entry['epoch']:>8.2f}{entry['rank']:>6}{_loss(entry['test_loss']):>10}"
        f"{entry['test_accuracy']:>9.4f}{entry['learning_rate']:>11.3g}"
        f"{entry['wall_seconds']:>10.1f}{entry['samples_per_second']:>11,.0f}"
    )


def _loss(value: float) -> str:
    """Format a loss so that it fits its column."""
    return f"{value:.4f}" if abs(value) < MAX_FIXED_LOSS else f"{value:.3e}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
