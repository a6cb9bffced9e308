"""What lies in a folder of runs, for the list of the live page; read again only where it changed.

Names are paths below the folder. Whatever leads out of it, by `..` or by a link, is no name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import time
from typing import Any

from paceline.errors import PacelineError, RecordsError
from paceline.records import Result, RunFolder
from paceline.study.folder import StudyFolder

DEPTH = 4
"""Runs and studies are looked for so many folders deep; a study's cells lie two deeper."""
SILENT_SECONDS = 60.0
"""A run without a result that has written nothing for so long does not run any more."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the list."""

    name: str
    kind: str
    """run, or study."""
    status: str
    """running, interrupted or damaged, besides those that a result has."""
    cause: str
    study: str
    """Name of the study whose cell it is; empty for others."""
    model: str
    data: str
    strategy: str
    workers: int
    changed: float
    """When its newest record was written, in seconds since 1970."""
    iterations: int | None = None
    iteration_seconds: float | None = None
    accuracy: float | None = None
    wall_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Library:
    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).resolve()
        if not self.root.is_dir():
            raise RecordsError(f"{root} is no folder: give the one that holds the runs")
        self._known: dict[str, tuple[tuple[int, ...], Entry]] = {}

    def path_of(self, name: str) -> Path:
        """The folder of a run or study; RecordsError for whatever is none of this library's."""
        try:
            path = (self.root / name).resolve()
        except (OSError, ValueError):
            path = Path()
        if not path.is_relative_to(self.root) or not (_is_run(path) or StudyFolder.is_one(path)):
            raise RecordsError(f"{name} is no run or study of {self.root.name}")
        return path

    def entries(self) -> list[Entry]:
        """All runs and studies, the newest first."""
        found: dict[str, tuple[tuple[int, ...], Entry]] = {}
        for path, study in _walk(self.root, DEPTH, ""):
            name = str(path.relative_to(self.root))
            stamp = _stamp(path)
            known = self._known.get(name)
            if known is not None and known[0] == stamp and known[1].status != "running":
                found[name] = known
            else:
                found[name] = (stamp, _entry(path, name, study))
        self._known = found
        return sorted((entry for _, entry in found.values()), key=lambda one: -one.changed)


def _walk(folder: Path, depth: int, study: str) -> Iterator[tuple[Path, str]]:
    if _is_run(folder):
        yield folder, study
        return
    if StudyFolder.is_one(folder):
        yield folder, ""
        yield from _walk(StudyFolder(folder).cells, 2, folder.name)
        return
    if depth == 0:
        return
    try:
        with os.scandir(folder) as entries:
            inside = sorted(
                entry.name
                for entry in entries
                # A link may lead anywhere.
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
            )
    except OSError:
        return
    for name in inside:
        yield from _walk(folder / name, depth - 1, study)


def _is_run(path: Path) -> bool:
    return (path / "config.json").is_file()


def _stamp(path: Path) -> tuple[int, ...]:
    """Other whenever a record that the list shows was written."""
    return tuple(
        _written(path / name) for name in ("config.json", "result.json", "study.json", ".lock")
    )


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def newest_seconds(path: Path) -> float:
    """When anything in a run's folder was last written."""
    try:
        with os.scandir(path) as files:
            return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
    except OSError:
        return 0.0


def _entry(path: Path, name: str, study: str) -> Entry:
    blank = Entry(name, "run", "damaged", "", study, "", "", "", 0, newest_seconds(path))
    try:
        if StudyFolder.is_one(path):
            return _study_entry(path, blank)
        return _run_entry(RunFolder(path), blank)
    except PacelineError as error:
        return _with(blank, cause=str(error).replace(f"{path}{os.sep}", ""))
    except (KeyError, TypeError, ValueError, AttributeError, OSError):
        return _with(blank, cause="its records have another shape than paceline's")


def _run_entry(folder: RunFolder, blank: Entry) -> Entry:
    config, result = folder.read_config(), folder.read_result()
    entry = _with(
        blank,
        model=config.model,
        data=config.data,
        strategy=config.strategy,
        workers=config.workers,
    )
    if result is None:
        runs = time() - entry.changed < SILENT_SECONDS
        return _with(entry, status="running" if runs else "interrupted")
    return _with(entry, **_outcome(result))


def _outcome(result: Result) -> dict[str, Any]:
    medians = [worker["iteration_seconds"].get("median") for worker in result["workers"]]
    known = [float(median) for median in medians if median is not None]
    return {
        "status": str(result["status"]),
        "cause": str(result["cause"] or ""),
        "iterations": int(result["iterations"]),
        "iteration_seconds": sum(known) / len(known) if known else None,
        "accuracy": result["final"].get("test_accuracy"),
        "wall_seconds": float(result["wall_seconds"]),
    }


def _study_entry(path: Path, blank: Entry) -> Entry:
    folder = StudyFolder(path)
    study = folder.read()
    finished = sum(folder.run_folder(cell).result_file.is_file() for cell in study.cells)
    count = len(study.cells)
    return _with(
        blank,
        kind="study",
        status="finished" if finished == count else "unfinished",
        cause=f"{finished} of {count} cells",
    )


def _with(entry: Entry, **values: Any) -> Entry:
    return Entry(**{**asdict(entry), **values})
