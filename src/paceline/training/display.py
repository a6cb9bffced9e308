"""What the user sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

COLUMNS_VARIABLE = "PACELINE_COLUMNS"
"""How wide a terminal is that another process shows this one's output on."""
COLUMNS = "   epoch  rank  val loss  val acc         lr    wall s  samples/s"
MOST_BAR_COLUMNS = 18
LARGEST_PLAIN_LOSS = 1e4
"""From here on four decimals would fill the column up to the one before it."""


@dataclass(slots=True)
class Status:
    """Where training stands between two evaluations."""

    iteration: int
    iterations: int
    loss: float
    learning_rate: float
    samples_per_second: float
    accuracy: float | None
    seconds_left: float


class Display(Protocol):
    def standing(self, standing: Status) -> None:
        """Called about twice a second."""

    def evaluation(self, entry: dict[str, Any]) -> None:
        """One row of the console columns: epoch, rank, loss, accuracy, learning rate, wall time."""

    def say(self, text: str) -> None:
        """A line to keep."""

    def close(self) -> None: ...


class SilentDisplay:
    def standing(self, standing: Status) -> None: ...
    def evaluation(self, entry: dict[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class PlainDisplay:
    """Lines for a log file; between evaluations a sign of life every `quiet_seconds`."""

    def __init__(self, out: TextIO | None = None, quiet_seconds: float = 10.0) -> None:
        self._out = out or sys.stdout
        self._quiet_seconds = quiet_seconds
        self._spoke = time.monotonic()
        self._headed = False

    def standing(self, standing: Status) -> None:
        if time.monotonic() - self._spoke >= self._quiet_seconds:
            self.say(_describe(standing))

    def evaluation(self, entry: dict[str, Any]) -> None:
        if not self._headed:
            self.say(COLUMNS)
            self._headed = True
        self.say(_row(entry))

    def say(self, text: str) -> None:
        self._spoke = time.monotonic()
        self._out.write(text + "\n")
        self._out.flush()

    def close(self) -> None: ...


class LiveDisplay:
    """Rows as in PlainDisplay, with one live line and bar below them.

    Refreshed only from the training loop: a refresh thread would compete with training for a core.
    """

    def __init__(self, width: int | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        is_terminal = True if COLUMNS_VARIABLE in os.environ else None
        self._console = Console(
            highlight=False, markup=False, width=width, force_terminal=is_terminal
        )
        self._bar = BarColumn(bar_width=MOST_BAR_COLUMNS)
        self._progress = Progress(
            self._bar,
            TextColumn("{task.description}"),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("starting ...", total=None)
        self._progress.start()
        self._progress.refresh()
        self._headed = False

    def standing(self, standing: Status) -> None:
        told = _describe(standing)
        # Words before the bar: it gives way to them, and to the space between.
        room = self._console.width - len(told) - 1
        self._bar.bar_width = min(MOST_BAR_COLUMNS, max(1, room))
        self._progress.update(
            self._task, total=standing.iterations, completed=standing.iteration, description=told
        )
        self._progress.refresh()

    def evaluation(self, entry: dict[str, Any]) -> None:
        if not self._headed:
            self._console.print(COLUMNS, style="bold")
            self._headed = True
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


def _describe(standing: Status) -> str:
    accuracy = "" if standing.accuracy is None else f" acc {standing.accuracy:.4f}"
    left = _duration(standing.seconds_left)
    return (
        f"{standing.iteration}/{standing.iterations} loss {_loss(standing.loss)}{accuracy}"
        f" lr {standing.learning_rate:.2g} {standing.samples_per_second:,.0f} samples/s {left} left"
    )


def _row(entry: dict[str, Any]) -> str:
    return (
        f"{entry['epoch']:>8.2f}{entry['rank']:>6}{_loss(entry['test_loss']):>10}"
        f"{entry['test_accuracy']:>9.4f}{entry['learning_rate']:>11.3g}"
        f"{entry['wall_seconds']:>10.1f}{entry['samples_per_second']:>11,.0f}"
    )


def _loss(value: float) -> str:
    """Short enough for its column, however far the loss has gone."""
    return f"{value:.4f}" if abs(value) < LARGEST_PLAIN_LOSS else f"{value:.3e}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
