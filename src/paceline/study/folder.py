"""The folder of a study: the runner writes it, reports read it.

    study.json     the planned study: its parts, and its cells in file order
    cells/<run>/   run folders (records.py); also for `tensorboard --logdir`
    logs/<id>.txt  output of a cell's command
    aside/         replaced runs: their settings changed, or they failed early
    .lock          held by the process that runs the study

study.json has a schema number and the fields of `Study`, `Part` and `Cell` by name. Two cells of
different parts with the same settings share a run: `run` of the later one is the id of the earlier
one. `trouble` is why a cell has no run, or why its run failed; the outcome of a run is in its own
result.json.
"""

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

STUDY_FILE = "study.json"
DONE = ("finished", "diverged")
"""Statuses of runs that are not repeated, because they would end the same way."""


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
    """Stable and readable, such as `nodes-2.strategy-ddp.r1`."""
    part: str
    """Name of its part."""
    group: str
    """The id without the repeat; cells of a group differ only in repeat and seed."""
    label: str
    """For tables and legends, such as `DDP, nodes 2`; the same for all repeats."""
    repeat: int
    """Starts at 1."""
    axes: dict[str, str]
    """Position in the grid: axis name to label of the value."""
    settings: dict[str, Any]
    """Arguments of `config.from_mapping` without out, name and defaults."""
    run: str
    """Name of its folder in cells/; another cell's id if both share a run."""
    elapsed_seconds: float | None = None
    """Duration of the command including startup; None: no runner finished it."""
    trouble: CellFailure | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A grid with its own sections in the report."""

    name: str
    title: str
    about: str
    """The question that the part answers; may be empty."""
    context: str
    """Published results for comparison; may be empty."""
    report: tuple[str, ...]
    """Names of its sections."""
    axes: dict[str, tuple[str, ...]]
    """Axis name to labels of its values, in order."""
    stands_in: str = ""
    """What replaces the model or data of the published results."""


@dataclass(frozen=True, slots=True)
class Study:
    name: str
    scale: str
    title: str
    about: str
    report: tuple[str, ...]
    """Sections about all parts; a study with one part has them in the part."""
    parts: tuple[Part, ...]
    cells: tuple[Cell, ...] = field(repr=False)
    stands_in: str = ""
    """As in a part, for the whole study."""
    answer: tuple[str, ...] = ()
    """`part` or `part.section` whose answers together answer `about`; empty: the first parts."""

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
        """Return the run folder of a cell, which may not exist."""
        return RunFolder(self.cells / cell.run)

    def result(self, cell: Cell) -> Result | None:
        """Return the result of a cell's run; None if it has not ended.

        RecordsError if it is not a run of `paceline train`.
        """
        folder = self.run_folder(cell)
        if not folder.config_file.is_file():
            return None
        result = folder.read_result()
        if result is not None and result.get("kind", "train") != "train":
            raise RecordsError(f"{folder.path} is not a run of `paceline train`")
        return result

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
        """Read the study; RecordsError if the folder has none."""
        if not self.study_file.is_file():
            raise RecordsError(f"{self.path} is not a study: it has no {STUDY_FILE}")
        values = read_json(self.study_file)
        try:
            return _study(values)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise RecordsError(f"{self.study_file} is damaged: it is not a study") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and hold its lock; the kernel releases it when this process ends.

        A cell that is still running inherits the lock, and keeps it while it writes its records.
        """
        try:
            make_folder(self.path)
        except OSError as error:
            raise RecordsError(f"cannot write to {self.path}: {error.strerror}") from None
        with locked(self.path, "wait for it, or choose another --out", is_inherited=True):
            yield

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
        stands_in=str(values.get("stands_in", "")),
        report=_names(values["report"]),
        answer=_names(values.get("answer", ())),
        parts=tuple(_part(part) for part in values["parts"]),
        cells=tuple(_cell(cell) for cell in values["cells"]),
    )


def _part(values: dict[str, Any]) -> Part:
    axes = {str(name): _names(labels) for name, labels in values["axes"].items()}
    texts = {key: str(values[key]) for key in ("name", "title", "about", "context")}
    stands_in = str(values.get("stands_in", ""))
    return Part(**texts, stands_in=stands_in, report=_names(values["report"]), axes=axes)


def _cell(values: dict[str, Any]) -> Cell:
    texts = {key: str(values[key]) for key in ("id", "part", "group", "label", "run")}
    if texts["run"] in ("", "..") or Path(texts["run"]).name != texts["run"]:
        raise ValueError("the run of a cell is outside the folder")
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
"""Maps a run folder to its step time, as in reports; None if no step was timed."""


@dataclass(frozen=True, slots=True)
class Row:
    """A group of repeats in the summary table of a study."""

    part: str
    label: str
    status: str
    accuracies: tuple[float, ...]
    """Final test accuracy of each finished repeat that has one."""
    losses: tuple[float, ...]
    """Final test loss of each finished repeat."""
    iteration_seconds: tuple[float, ...]
    """Step time of each finished repeat."""


def rows(folder: StudyFolder, study: Study, step_seconds: StepSeconds) -> Iterator[Row]:
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in study.cells:
        groups.setdefault((cell.part, cell.group), []).append(cell)
    for (part, _), cells in groups.items():
        yield _row(folder, part, cells, step_seconds)


def _row(folder: StudyFolder, part: str, cells: list[Cell], step_seconds: StepSeconds) -> Row:
    statuses: Counter[str] = Counter()
    figures: list[tuple[float | None, float | None, float | None]] = []
    for cell in cells:
        try:
            status, result = folder.status(cell), folder.result(cell)
            if status == "finished" and result is not None:
                seconds = step_seconds(folder.run_folder(cell).path)
                final = result["final"]
                figures.append((final.get("test_accuracy"), final.get("test_loss"), seconds))
        except (RecordsError, LookupError, TypeError, AttributeError):
            # The result is valid JSON with unexpected contents.
            status = "damaged"
        statuses[status] += 1
    counts = [status if len(cells) == 1 else f"{count} {status}"
             for status, count in statuses.items()]  # fmt: skip
    return Row(
        part=part,
        label=cells[0].label,
        status=", ".join(counts),
        accuracies=tuple(value for value, _, _ in figures if value is not None),
        losses=tuple(value for _, value, _ in figures if value is not None),
        iteration_seconds=tuple(value for _, _, value in figures if value is not None),
    )
