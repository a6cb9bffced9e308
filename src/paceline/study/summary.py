"""The cells of a study in a few figures each, repeats together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from paceline.errors import RecordsError
from paceline.records import Result
from paceline.study.folder import Cell, Study, StudyFolder


@dataclass(frozen=True, slots=True)
class Row:
    part: str
    label: str
    status: str
    accuracies: tuple[float, ...]
    """Of the finished repeats, at the end."""
    iteration_seconds: tuple[float, ...]
    """Of the finished repeats: the mean over the workers of their mean iterations."""


def rows(folder: StudyFolder, study: Study) -> Iterator[Row]:
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in study.cells:
        groups.setdefault((cell.part, cell.group), []).append(cell)
    for (part, _), cells in groups.items():
        yield _row(folder, part, cells)


def _row(folder: StudyFolder, part: str, cells: list[Cell]) -> Row:
    statuses: Counter[str] = Counter()
    figures: list[tuple[float | None, float | None]] = []
    for cell in cells:
        try:
            status, result = folder.status(cell), folder.result(cell)
            if status == "finished" and result is not None:
                figures.append(_figures(result))
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


def _figures(result: Result) -> tuple[float | None, float | None]:
    """Accuracy, and seconds of an iteration."""
    means = [worker["iteration_seconds"]["mean"] for worker in result["workers"]]
    known = [mean for mean in means if mean is not None]
    return result["final"].get("test_accuracy"), fmean(known) if known else None
