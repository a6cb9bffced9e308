"""The cells of a study in a few figures each, repeats together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RecordsError
from paceline.study.folder import Cell, Study, StudyFolder

StepSeconds = Callable[[Path], float | None]
"""From a run's folder to its step time, as a report defines it; None where none was timed."""


@dataclass(frozen=True, slots=True)
class Row:
    part: str
    label: str
    status: str
    accuracies: tuple[float, ...]
    """Of the finished repeats, at the end."""
    iteration_seconds: tuple[float, ...]
    """Of the finished repeats."""


def rows(folder: StudyFolder, study: Study, step_seconds: StepSeconds) -> Iterator[Row]:
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in study.cells:
        groups.setdefault((cell.part, cell.group), []).append(cell)
    for (part, _), cells in groups.items():
        yield _row(folder, part, cells, step_seconds)


def _row(folder: StudyFolder, part: str, cells: list[Cell], step_seconds: StepSeconds) -> Row:
    statuses: Counter[str] = Counter()
    figures: list[tuple[float | None, float | None]] = []
    for cell in cells:
        try:
            status, result = folder.status(cell), folder.result(cell)
            if status == "finished" and result is not None:
                seconds = step_seconds(folder.run_folder(cell).path)
                figures.append((result["final"].get("test_accuracy"), seconds))
        except (RecordsError, LookupError, TypeError, AttributeError):
            # A result can be whole JSON and still hold what no run writes.
            status = "damaged"
        statuses[status] += 1
    words = [status if len(cells) == 1 else f"{count} {status}"
             for status, count in statuses.items()]  # fmt: skip
    return Row(
        part=part,
        label=cells[0].label,
        status=", ".join(words),
        accuracies=tuple(value for value, _ in figures if value is not None),
        iteration_seconds=tuple(value for _, value in figures if value is not None),
    )
