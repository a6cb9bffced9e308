"""The index of a folder of runs for the live page; reads again only what changed.

Names are paths relative to the folder. A path that leaves it, by `..` or a symbolic link, is
rejected.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from time import time
from typing import Any

from paceline.analysis.run import Run
from paceline.analysis.validation import check_result, is_number
from paceline.errors import PacelineError, RecordsError
from paceline.folder_lock import is_in_use
from paceline.records import Result, RunFolder, open_record
from paceline.study.folder import DONE, STUDY_FILE, Cell, StudyFolder

DEPTH = 4
"""Maximum depth of runs and studies; a study's cells are two levels deeper."""
SILENT_SECONDS = 60.0
"""A run without a result counts as interrupted after this long without a write."""
STAMPED = ("config.json", "result.json", "events-0.jsonl", STUDY_FILE, ".lock")
"""Files whose modification times tell whether an entry changed."""

PROBLEM_STATUSES = ("failed", "skipped", "stopped", "damaged")
"""Cell statuses that a study's entry counts besides those done."""

TAIL_BYTES = 65536
"""Read from the end of the events of a running run."""

Stamp = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the list."""

    name: str
    kind: str
    """run or study."""
    status: str
    """The status of the result, or running, interrupted or damaged."""
    cause: str
    study: str
    """Name of the study that it is a cell of; empty for others."""
    model: str
    script: str
    """Of a run that `paceline train` did not start; empty for others."""
    data: str
    strategy: str
    workers: int
    changed: float
    """Unix time of its newest record."""
    iterations: int | None = None
    iteration_seconds: float | None = None
    """As in a report; the latest value while the run is training."""
    accuracy: float | None = None
    test_loss: float | None = None
    wall_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class RunIndex:
    """The runs and studies below a folder."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).resolve()
        if not self.root.is_dir():
            raise RecordsError(f"{root} is not a folder: give the folder that contains the runs")
        self._known: dict[str, tuple[Stamp, Entry]] = {}
        self._reading = Lock()

    def path_of(self, name: str) -> Path:
        """The folder of a run or study; RecordsError for any other path."""
        try:
            path = (self.root / name).resolve()
            is_here = path.is_relative_to(self.root)
            if is_here and (_is_run(path) or StudyFolder.is_study(path)):
                self._check_links(path)
                return path
        except (OSError, ValueError, RuntimeError):
            pass
        raise RecordsError(f"{name} is not a run or study in {self.root.name}")

    def entries(self) -> list[Entry]:
        """All runs and studies, newest first."""
        # One reader at a time: the second finds what the first has read.
        with self._reading:
            found: dict[str, tuple[Stamp, Entry]] = {}
            for path, study, stamp in _walk(str(self.root), DEPTH, None):
                name, of_study = self._name(path), "" if study is None else self._name(study)
                known = self._known.get(name)
                if known is not None and known[0] == stamp and known[1].status != "running":
                    found[name] = known
                else:
                    found[name] = (stamp, self._entry(Path(path), name, of_study))
            self._known = found
        entries = [entry for _, entry in found.values()]
        running = {entry.study for entry in entries if entry.status == "running"}
        return sorted(
            (replace(one, status="running") if one.name in running else one for one in entries),
            key=lambda one: -one.changed,
        )

    def _entry(self, path: Path, name: str, study: str) -> Entry:
        blank = Entry(name, "run", "damaged", "", study, "", "", "", "", 0, newest_seconds(path))
        try:
            self._check_links(path)
            if StudyFolder.is_study(path):
                return _study_entry(path, blank)
            return _run_entry(RunFolder(path), blank)
        except PacelineError as error:
            return replace(blank, cause=str(error).replace(f"{path}{os.sep}", ""))
        except OSError as error:
            return replace(blank, cause=f"cannot read it: {error.strerror}")

    def _check_links(self, path: Path) -> None:
        """RecordsError if a record is a symbolic link to a file outside the folder."""
        for link in _links_among_records(path):
            try:
                target = link.resolve()
            except (OSError, RuntimeError):
                name = link.relative_to(path)
                raise RecordsError(f"{name} is a symbolic link to itself") from None
            if not target.is_relative_to(self.root):
                raise RecordsError(
                    f"{link.relative_to(path)} links to a path outside {self.root.name}"
                )

    def _name(self, path: str) -> str:
        # File names are bytes; one that is not valid UTF-8 is shown with replacement characters.
        relative = os.path.relpath(path, self.root)
        return os.fsencode(relative).decode("utf-8", "replace")


def _walk(folder: str, depth: int, study: str | None) -> Iterator[tuple[str, str | None, Stamp]]:
    """Runs and studies: path, path of the study that it is a cell of, and stamp."""
    try:
        with os.scandir(folder) as entries:
            inside = {entry.name: entry for entry in entries}
    except OSError:
        return
    if _is_file(inside, "config.json"):
        yield folder, study, _stamp(inside)
    elif _is_file(inside, STUDY_FILE):
        yield folder, None, _stamp(inside)
        if "cells" in inside and inside["cells"].is_dir(follow_symlinks=False):
            yield from _walk(inside["cells"].path, 2, folder)
    elif depth:
        for name, entry in sorted(inside.items()):
            # Links are not followed: they may lead outside the folder.
            if not name.startswith(".") and entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, depth - 1, study)


def _is_file(inside: Mapping[str, os.DirEntry[str]], name: str) -> bool:
    try:
        return name in inside and inside[name].is_file()
    except OSError:
        # A symbolic link to itself.
        return False


def _is_run(path: Path) -> bool:
    return (path / "config.json").is_file()


def _stamp(inside: Mapping[str, os.DirEntry[str]]) -> Stamp:
    """Modification times; changes whenever a record that the list shows is written."""
    return tuple(_written(inside[name]) if name in inside else 0 for name in STAMPED)


def _written(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_mtime_ns if entry.is_file() else 0
    except OSError:
        # Records are replaced by renaming: a listed file may no longer exist.
        return 0


def newest_seconds(path: Path) -> float:
    """Unix time of the last write in a run's folder."""
    try:
        with os.scandir(path) as files:
            return max(map(_written, files), default=0) / 1e9
    except OSError:
        return 0.0


def _links_among_records(path: Path) -> Iterator[Path]:
    """Symbolic links among the records of a run, or of a study and its cells."""
    yield from _links(path, (".json", ".jsonl", "cells"))
    cells = StudyFolder(path).cells
    if StudyFolder.is_study(path) and cells.is_dir():
        yield from _links(cells, ("",))
        for cell in filter(Path.is_dir, cells.iterdir()):
            yield from _links(cell, (".json", ".jsonl"))


def _links(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    with os.scandir(folder) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if entry.is_symlink() and entry.name.endswith(endings)
        ]


def _run_entry(folder: RunFolder, blank: Entry) -> Entry:
    settings, result = folder.read_settings(), folder.read_result()
    entry = replace(
        blank,
        model=settings.model_text or "",
        script="" if settings.model_text else settings.script or "",
        data=settings.data or "",
        strategy=settings.strategy or "",
        workers=settings.workers,
    )
    run = Run(folder, settings, result)
    if result is None and time() - entry.changed < SILENT_SECONDS:
        return replace(entry, status="running", **_progress(folder.events_file(0)))
    if result is None:
        seconds = run.iteration_seconds
        done = run.iterations if seconds is not None else None
        return replace(entry, status="interrupted", iterations=done, iteration_seconds=seconds)
    check_result(result, str(folder.result_file))
    return replace(entry, **_outcome(run, result))


def _outcome(run: Run, result: Result) -> dict[str, Any]:
    return {
        "status": str(result["status"]),
        "cause": str(result["cause"] or ""),
        "iterations": int(result["iterations"]),
        "iteration_seconds": run.iteration_seconds,
        "accuracy": result["final"].get("test_accuracy"),
        "test_loss": result["final"].get("test_loss"),
        "wall_seconds": float(result["wall_seconds"]),
    }


def _progress(events: Path) -> dict[str, Any]:
    """Iterations done and latest step time, from the last complete lines of rank 0."""
    try:
        with open_record(events) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and event.get("event") == "iterations":
            first, seconds = event.get("first"), event.get("seconds")
            if not is_number(first) or not isinstance(seconds, list) or not seconds:
                continue
            known = list(filter(is_number, seconds))
            mean = sum(known) / len(known) if known else None
            return {"iterations": int(first) + len(seconds), "iteration_seconds": mean}
    return {}


def _study_entry(path: Path, blank: Entry) -> Entry:
    folder = StudyFolder(path)
    study = folder.read()
    # Parts of a study may share runs.
    cells = {cell.run: cell for cell in study.cells}.values()
    statuses = Counter(_status(folder, cell) for cell in cells)
    done = sum(statuses.pop(status, 0) for status in DONE)
    others = (
        f"{count} {status}" for status, count in statuses.items() if status in PROBLEM_STATUSES
    )
    # Between cells, and while one starts, no run of a study is running.
    unfinished = "running" if is_in_use(path) else "unfinished"
    return replace(
        blank,
        kind="study",
        status=unfinished if statuses else "finished",
        cause=", ".join([f"{done} of {len(cells)} cells", *others]),
    )


def _status(folder: StudyFolder, cell: Cell) -> str:
    try:
        return folder.status(cell)
    except RecordsError:
        return "damaged"
