"""The cells of a study in a few figures each, repeats together."""

from __future__ import annotations

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
    statuses: dict[str, int] = {}
    results: list[Result] = []
    for cell in cells:
        try:
            status, result = folder.status(cell), folder.result(cell)
        except RecordsError:
            status, result = "damaged", None
        statuses[status] = statuses.get(status, 0) + 1
        if status == "finished" and result is not None:
            results.append(result)
    words = [status if len(cells) == 1 else f"{count} {status}"
             for status, count in statuses.items()]  # fmt: skip
    accuracies = (result["final"].get("test_accuracy") for result in results)
    means = (
        [
            mean
            for worker in result["workers"]
            if (mean := worker["iteration_seconds"]["mean"]) is not None
        ]
        for result in results
    )
    return Row(
        part=part,
        label=cells[0].label,
        status=", ".join(words),
        accuracies=tuple(value for value in accuracies if value is not None),
        iteration_seconds=tuple(fmean(each) for each in means if each),
    )
