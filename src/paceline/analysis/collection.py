"""Reads a run, a folder of runs or a study.

Records that cannot be read are named and skipped: one damaged file must not cost the report of the
others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.analysis.events import has_end
from paceline.analysis.run import Run, open_run
from paceline.analysis.run_group import NOT_RUN, RunGroup, group_runs
from paceline.analysis.validation import is_number
from paceline.errors import MissingRecordError, RecordsError
from paceline.study.folder import Part, Study, StudyFolder


def missing_events(run: Run) -> list[str]:
    """Describe the events that a finished run lacks; curves and step times are made of them.

    Elastic runs are not checked: their workers come and go.
    """
    if run.result is None or not run.is_finished or run.settings.get("elastic"):
        return []
    missing = []
    for worker in run.workers:
        path = run.folder.events_file(worker["rank"])
        if not is_number(worker["iteration_seconds"].get("mean")):
            continue
        if not path.is_file():
            missing.append(f"events of rank {worker['rank']} are missing")
        else:
            end = _end(run, worker["rank"])
            # In asynchronous runs, a worker's iterations are not those of the run.
            if not has_end(path) or (run.is_synchronous and end < run.iterations):
                missing.append(
                    f"events of rank {worker['rank']} end at iteration {end:,}"
                    f" of {run.iterations:,}"
                )
    return missing


def _end(run: Run, rank: int) -> int:
    ranks = run.timing.ranks if run.timing is not None else []
    return next((one.end for one in ranks if one.rank == rank), 0)


DEPTH = 3
"""Folder levels to search for runs."""


@dataclass(frozen=True, slots=True)
class SkippedRecord:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Chapter:
    """Groups that belong together, and the sections to show about them."""

    title: str
    groups: list[RunGroup]
    about: str = ""
    context: str = ""
    sections: tuple[str, ...] = ()
    """Names, in order; empty: all sections with data."""
    name: str = ""
    """Of a study's part."""
    stands_in: str = ""
    """What replaces the model or data of the published results."""


@dataclass(slots=True)
class RunCollection:
    title: str
    kind: str
    """run, runs or study."""
    path: Path
    chapters: list[Chapter]
    about: str = ""
    skipped: list[SkippedRecord] = field(default_factory=list)
    stands_in: str = ""
    sections: tuple[str, ...] = ()
    """About all groups together, where there are several chapters."""
    answer: tuple[str, ...] = ()
    """`part` or `part.section` that answer the question of a study of several parts."""
    comm: list[Path] = field(default_factory=list)
    """Files of `paceline comm --json` beside the runs."""

    @property
    def groups(self) -> list[RunGroup]:
        """Each group once, even where two chapters show it."""
        seen: dict[int, RunGroup] = {}
        for chapter in self.chapters:
            for one in chapter.groups:
                seen.setdefault(id(one.runs[0]) if one.runs else id(one), one)
        return list(seen.values())

    @property
    def runs(self) -> list[Run]:
        return [run for one in self.groups for run in one.runs]


def collect(path: Path | str) -> RunCollection:
    """Read all records at `path`; RecordsError if there are none."""
    collection = _collect(path)
    for run in collection.runs:
        texts = [*_config_damage(run), *missing_events(run)]
        collection.skipped += [SkippedRecord(run.id, text) for text in texts]
    collection.comm = sorted(collection.path.glob("comm*.json"))
    return collection


def _config_damage(run: Run) -> list[str]:
    """What is wrong with config.json, where its copy in result.json is used instead."""
    if run.result is None:
        return []
    try:
        run.folder.read_settings()
    except MissingRecordError:
        # result.json alone is enough.
        return []
    except RecordsError as error:
        reason = str(error).replace(f"{run.folder.path}{os.sep}", "")
        return [f"{reason}; the settings in result.json are used"]
    return []


def _collect(path: Path | str) -> RunCollection:
    root = Path(path).resolve()
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
        raise RecordsError(f"{path} {problem}: give a run, a folder of runs or a study")
    if StudyFolder.is_study(root):
        return _study(StudyFolder(root))
    if _is_run(root):
        run = open_run(root)
        return RunCollection(run.id, "run", root, [Chapter(run.id, group_runs([run]))])
    skipped: list[SkippedRecord] = []
    runs = _open_all(_runs_below(root, DEPTH), root, skipped)
    if not runs and not skipped:
        raise RecordsError(f"{path} contains no runs: the folder of a run has a config.json")
    if not runs:
        raise RecordsError(f"{path} contains no readable run: {skipped[0].reason}")
    runs = _without_copies(runs, root, skipped)
    title = "one run" if len(runs) == 1 else f"{len(runs):,} runs"
    chapter = Chapter(f"{root.name}: {title}", group_runs(runs))
    return RunCollection(root.name, "runs", root, [chapter], skipped=skipped)


def _is_run(path: Path) -> bool:
    try:
        return (path / "config.json").is_file() or (path / "result.json").is_file()
    except OSError:
        return False


def _runs_below(path: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(path) as entries:
            folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        # Not readable, or deleted since it was listed.
        return
    for folder in sorted(folders, key=_by_number):
        if _is_run(folder):
            yield folder
        elif depth > 1 and not folder.name.startswith("."):
            yield from _runs_below(folder, depth - 1)


def _by_number(folder: Path) -> list[tuple[int, str]]:
    """Sort key: batch-32 before batch-256."""
    parts = re.split(r"(\d+)", folder.name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def _open_all(folders: Iterator[Path], root: Path, skipped: list[SkippedRecord]) -> list[Run]:
    runs = []
    for folder in folders:
        run = _open_or_skip(folder, root, skipped)
        if run is not None:
            runs.append(run)
    return runs


def _without_copies(runs: list[Run], root: Path, skipped: list[SkippedRecord]) -> list[Run]:
    """Each run once: a copy of its folder is not a repeat."""
    originals: dict[str, Run] = {}
    for run in runs:
        kept = originals.setdefault(run.fingerprint, run)
        # Prefer the folder that still has the name of the run.
        if run.result is not None and run.result["id"] == run.id != kept.id:
            originals[run.fingerprint] = run
    for run in runs:
        kept = originals[run.fingerprint]
        if run is not kept:
            names = [str(one.folder.path.relative_to(root)) for one in (run, kept)]
            skipped.append(SkippedRecord(names[0], f"a copy of {names[1]}"))
    return [run for run in runs if originals[run.fingerprint] is run]


def _open_or_skip(folder: Path, root: Path, skipped: list[SkippedRecord]) -> Run | None:
    try:
        return open_run(folder)
    except RecordsError as error:
        # The skipped record names the path already, relative to the root.
        reason = str(error).replace(f"{folder}{os.sep}", "")
        skipped.append(SkippedRecord(str(folder.relative_to(root)), reason))
        return None


def _study(folder: StudyFolder) -> RunCollection:
    study = folder.read()
    skipped: list[SkippedRecord] = []
    opened: dict[str, Run | None] = {}
    chapters = [_chapter(folder, study, part, opened, skipped) for part in study.parts]
    return RunCollection(
        title=study.title or study.name,
        kind="study",
        path=folder.path,
        chapters=chapters,
        about=study.about,
        skipped=skipped,
        stands_in=study.stands_in,
        sections=study.report,
        answer=study.answer,
    )


def _chapter(
    folder: StudyFolder,
    study: Study,
    part: Part,
    opened: dict[str, Run | None],
    skipped: list[SkippedRecord],
) -> Chapter:
    runs: dict[str, list[Run]] = {}
    labels: dict[str, str] = {}
    troubles: dict[str, str] = {}
    axes: dict[str, dict[str, str]] = {}
    for cell in study.cells_of(part.name):
        runs.setdefault(cell.group, [])
        labels[cell.group], axes[cell.group] = cell.label, cell.axes
        path = folder.run_folder(cell).path
        if cell.run not in opened:
            opened[cell.run] = _open_or_skip(path, folder.path, skipped) if _is_run(path) else None
        run = opened[cell.run]
        if run is not None:
            runs[cell.group].append(run)
        elif cell.trouble is not None:
            troubles.setdefault(cell.group, f"{cell.trouble.status}: {cell.trouble.cause}")
        else:
            troubles.setdefault(cell.group, NOT_RUN)
    groups = [
        RunGroup(labels[name], runs[name], troubles.get(name, ""), axes[name]) for name in runs
    ]
    return Chapter(
        part.title or part.name, groups, part.about, part.context, part.report, part.name,
        part.stands_in,
    )  # fmt: skip
