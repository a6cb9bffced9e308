"""Progress display of a run: a live status line on terminals, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

COLUMNS_VARIABLE = "PACELINE_COLUMNS"
"""Width of the terminal if another process displays the output of this one."""
MAX_BAR_COLUMNS = 18
MAX_FIXED_LOSS = 1e4
"""Larger losses do not fit the column with four decimals."""
FOLLOW_FROM_LOSS = ("perplexity", "bits_per_byte")


@dataclass(slots=True)
class Status:
    """Status of training between two evaluations."""

    iteration: int
    iterations: int
    loss: float
    learning_rate: float
    samples_per_second: float
    metrics: Mapping[str, float | None]
    """Of the last evaluation."""
    seconds_left: float


class Display(Protocol):
    def update(self, status: Status) -> None:
        """Show the status; called about twice per second."""

    def evaluation(self, entry: dict[str, Any]) -> None:
        """Print one row: epoch, rank, loss, metrics, learning rate, wall time and throughput."""

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
            self.say(_describe(status, "samples/s per worker"))

    def evaluation(self, entry: dict[str, Any]) -> None:
        if not self._has_header:
            self.say(_header(entry))
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
        # More would not fit into 80 columns.
        text = _describe(status, "samples/s")
        # The bar shrinks to leave room for the text and a space.
        columns_left = self._console.width - len(text) - 1
        self._bar.bar_width = min(MAX_BAR_COLUMNS, max(1, columns_left))
        self._progress.update(
            self._task, total=status.iterations, completed=status.iteration, description=text
        )
        self._progress.refresh()

    def evaluation(self, entry: dict[str, Any]) -> None:
        if not self._has_header:
            self._console.print(_header(entry), style="bold")
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


def _describe(status: Status, rate_unit: str) -> str:
    # The first is the accuracy, if there is one; more would not fit.
    shown = [*_shown(status.metrics).items()][:1]
    metric = "".join(f" {title.removeprefix('test ')} {text}" for title, text in shown)
    left = _duration(status.seconds_left)
    return (
        f"{status.iteration}/{status.iterations} loss {_number(status.loss)}{metric}"
        f" lr {status.learning_rate:.2g} {status.samples_per_second:,.0f} {rate_unit} {left} left"
    )


def _header(entry: dict[str, Any]) -> str:
    return "".join(f"{title:>{width}}" for title, width, _ in _columns(entry))


def _row(entry: dict[str, Any]) -> str:
    return "".join(f"{text:>{width}}" for _, width, text in _columns(entry))


def _columns(entry: dict[str, Any]) -> Iterator[tuple[str, int, str]]:
    """Title, width and text of each column."""
    yield "epoch", 8, f"{entry['epoch']:.2f}"
    yield "rank", 6, str(entry["rank"])
    yield "test loss", 10, _number(entry["test_loss"])
    for title, text in _shown(entry["metrics"]).items():
        yield title, max(9, len(title) + 2), text
    yield "lr", 11, f"{entry['learning_rate']:.3g}"
    yield "wall s", 10, f"{entry['wall_seconds']:.1f}"
    yield "samples/s", 11, f"{entry['samples_per_second']:,.0f}"


def _shown(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """Return title and text of each metric that does not follow from the loss beside it."""
    return {
        "test acc" if name == "accuracy" else name: "-" if value is None else _number(value)
        for name, value in metrics.items()
        if name not in FOLLOW_FROM_LOSS
    }


def _number(value: float) -> str:
    """Format a loss or a metric so that it fits its column."""
    return f"{value:.4f}" if abs(value) < MAX_FIXED_LOSS else f"{value:.3e}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
