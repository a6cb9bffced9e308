"""Progress of a study: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from paceline.formatting import format_duration


class Display(Protocol):
    """Shows the runner's progress; a context manager."""

    def begin(self, cell_id: str, number: int, total: int, left_seconds: float | None) -> None: ...

    def tick(self, spent_seconds: float, left_seconds: float | None) -> None: ...

    def end(self, cell_id: str, status: str, spent_seconds: float, cause: str) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def choose(console: Console) -> Display:
    return BarDisplay(console) if console.is_terminal else LineDisplay(console)


class LineDisplay:
    """Prints a line when a cell starts and when it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._position = ""

    def begin(self, cell_id: str, number: int, total: int, left_seconds: float | None) -> None:
        self._position = f"[{number}/{total}]"
        left = "" if left_seconds is None else f" (about {format_duration(left_seconds)} left)"
        self._print(f"{self._position} {cell_id} ...{left}")

    def tick(self, spent_seconds: float, left_seconds: float | None) -> None:
        pass

    def end(self, cell_id: str, status: str, spent_seconds: float, cause: str) -> None:
        tail = f": {cause}" if cause else ""
        self._print(f"{self._position} {cell_id} {status} after {spent_seconds:.1f} s{tail}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class BarDisplay(LineDisplay):
    """Shows a bar with the running cell, and prints a line above it for each that ended."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)
        self._cell_id = ""

    def begin(self, cell_id: str, number: int, total: int, left_seconds: float | None) -> None:
        self._cell_id, self._position = cell_id, f"[{number}/{total}]"
        self._bar.update(self._task, total=total, completed=number - 1)
        self.tick(0.0, left_seconds)

    def tick(self, spent_seconds: float, left_seconds: float | None) -> None:
        left = "" if left_seconds is None else f", about {format_duration(left_seconds)} left"
        text = f"{self._cell_id} {format_duration(spent_seconds)}{left}"
        self._bar.update(self._task, description=text)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
