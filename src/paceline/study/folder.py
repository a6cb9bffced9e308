"""One runner at a time in a study's folder.

The folder of a study: what the runner writes and reports read.

    study.json     the study as it was planned: its parts, its cells in the order of the file
    cells/<run>/   ordinary folders of runs (records.py), for `tensorboard --logdir` too
    logs/<id>.txt  what a cell's command printed
    aside/         runs that were replaced, because their settings changed or they broke early
    .lock          held by the process that runs the study

study.json holds the fields of `Study`, `Part` and `Cell` below by name, and a schema number. Two
cells with the same settings, in different parts, are one run: the later one's `run` is the id of
the earlier one. `trouble` tells why there is no run, or why it failed; how a run went is in its own
result.json.

The cells of a study in a few figures each, repeats together."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import RecordsError
from paceline.folder_lock import locked
from paceline.records import SCHEMA, Result, RunFolder, make_folder, read_json, write_json


@contextmanager
def held(folder: StudyFolder) -> Iterator[None]:
    """Hold the folder's lock; the kernel takes it back when this process ends, however it does.

    A cell that it has started then holds it on, for the moments in which it writes what it has.
    """
    try:
        make_folder(folder.path)
    except OSError as error:
        raise RecordsError(f"cannot write to {folder.path}: {error.strerror}") from None
    with locked(folder.path, "wait for it, or give another --out", is_inherited=True):
        yield


STUDY_FILE = "study.json"
DONE = ("finished", "diverged")
"""How a run may have ended that need not be run again: it would end the same way."""


@dataclass(frozen=True, slots=True)
class CellFailure:
    """Why a cell has no finished run."""

    status: str
    """skipped (this machine cannot run it) or failed."""
    cause: str


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a study."""

    id: str
    """Stable and readable, as in `nodes-2.strategy-ddp.r1`."""
    part: str
    """Name of the part it belongs to."""
    group: str
    """The id without the repeat: cells of one group differ only in their repeat (and seed)."""
    label: str
    """For tables and legends, as in `DDP, nodes 2`; the same for all repeats."""
    repeat: int
    """From 1 on."""
    axes: dict[str, str]
    """The cell's place in its grid: axis name -> label of the value."""
    settings: dict[str, Any]
    """What `config.from_mapping` takes, without out and name; defaults are left out."""
    run: str
    """Name of its folder below cells/; another cell's id where the settings are the same."""
    elapsed_seconds: float | None = None
    """What the whole command took, process start included; None: not finished by a runner."""
    trouble: CellFailure | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A grid of its own, with sections of its own in the report."""

    name: str
    title: str
    about: str
    """The question that this part answers; may be empty."""
    context: str
    """What others measured, for the reader; may be empty."""
    report: tuple[str, ...]
    """Names of the sections it wants."""
    axes: dict[str, tuple[str, ...]]
    """Axis name -> labels of its values, in order."""


@dataclass(frozen=True, slots=True)
class Study:
    name: str
    scale: str
    title: str
    about: str
    report: tuple[str, ...]
    """Sections about all parts together; a study of one part has them there."""
    parts: tuple[Part, ...]
    cells: tuple[Cell, ...] = field(repr=False)

    def cells_of(self, part: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.part == part]


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """The files of one study."""

    path: Path

    @property
    def study_file(self) -> Path:
        return self.path / STUDY_FILE

    @property
    def cells(self) -> Path:
        return self.path / "cells"

    @property
    def aside(self) -> Path:
        return self.path / "aside"

    def log_file(self, cell: Cell) -> Path:
        return self.path / "logs" / f"{cell.run}.txt"

    def run_folder(self, cell: Cell) -> RunFolder:
        """The records of a cell; whether it exists is another matter."""
        return RunFolder(self.cells / cell.run)

    def result(self, cell: Cell) -> Result | None:
        """How a cell's run ended; None where it did not, or never began."""
        folder = self.run_folder(cell)
        return folder.read_result() if folder.config_file.is_file() else None

    def status(self, cell: Cell) -> str:
        """finished, diverged, failed, stopped, skipped, unfinished (running or killed), waiting."""
        if cell.trouble is not None:
            return cell.trouble.status
        result = self.result(cell)
        if result is not None:
            return str(result["status"])
        return "unfinished" if self.run_folder(cell).config_file.is_file() else "waiting"

    @classmethod
    def is_study(cls, path: Path | str) -> bool:
        return (Path(path) / STUDY_FILE).is_file()

    def read(self) -> Study:
        """The study that this folder holds; RecordsError where it holds none."""
        if not self.study_file.is_file():
            raise RecordsError(f"{self.path} is not a study: it has no {STUDY_FILE}")
        values = read_json(self.study_file)
        try:
            return _study(values)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise RecordsError(f"{self.study_file} is damaged: it is not a study") from None

    def write(self, study: Study) -> None:
        try:
            make_folder(self.path)
            write_json(self.study_file, {"schema": SCHEMA, **dataclasses.asdict(study)})
        except OSError as error:
            raise RecordsError(f"cannot write to {self.path}: {error.strerror}") from None


def _study(values: dict[str, Any]) -> Study:
    texts = {key: str(values[key]) for key in ("name", "scale", "title", "about")}
    return Study(
        **texts,
        report=_names(values["report"]),
        parts=tuple(_part(part) for part in values["parts"]),
        cells=tuple(_cell(cell) for cell in values["cells"]),
    )


def _part(values: dict[str, Any]) -> Part:
    axes = {str(name): _names(labels) for name, labels in values["axes"].items()}
    texts = {key: str(values[key]) for key in ("name", "title", "about", "context")}
    return Part(**texts, report=_names(values["report"]), axes=axes)


def _cell(values: dict[str, Any]) -> Cell:
    texts = {key: str(values[key]) for key in ("id", "part", "group", "label", "run")}
    if texts["run"] in ("", "..") or Path(texts["run"]).name != texts["run"]:
        raise ValueError("a cell's run lies elsewhere")
    elapsed, trouble = values.get("elapsed_seconds"), values.get("trouble")
    return Cell(
        **texts,
        repeat=int(values["repeat"]),
        axes={str(axis): str(label) for axis, label in values["axes"].items()},
        settings=dict(values["settings"]),
        elapsed_seconds=None if elapsed is None else float(elapsed),
        trouble=CellFailure(str(trouble["status"]), str(trouble["cause"])) if trouble else None,
    )


def _names(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(map(str, values))


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
