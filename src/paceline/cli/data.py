"""`paceline data`: list, fetch and verify datasets.

Each action imports what it needs, so that `paceline --help` stays fast.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.data import DATASETS
from paceline.data.manifest import OFFICIAL_SETS, DatasetManifest, data_folder
from paceline.errors import DataError, UnknownNameError, shown, suggest

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from paceline.data.download import RetryPolicy

SUMMARY = "list, fetch and verify datasets"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summaries = {
        "list": "list datasets and whether their files are present",
        "fetch": "download official files; resumes, and verifies checksums",
        "verify": "compare files with the official checksums, and try to read those that differ",
    }
    for action, summary in summaries.items():
        sub = actions.add_parser(action, help=summary, description=summary)
        if action != "list":
            sub.add_argument(
                "names", nargs="+", metavar="NAME", help=f"dataset: {', '.join(OFFICIAL_SETS)}"
            )
        sub.add_argument(
            "--data-dir",
            metavar="DIR",
            help="folder of the files (default: $PACELINE_DATA, else ~/.cache/paceline)",
        )
        if action == "fetch":
            sub.add_argument(
                "--force",
                action="store_true",
                help="replace existing files that are not the official ones",
            )


def run(arguments: argparse.Namespace) -> int:
    try:
        return _run(arguments, data_folder(arguments.data_dir))
    except OSError as error:
        if error.filename is None:
            raise
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from None


def _run(arguments: argparse.Namespace, folder: Path) -> int:
    if arguments.action == "list":
        return list_sets(folder)
    chosen = [_official(name) for name in arguments.names]
    if arguments.action == "fetch":
        return fetch_sets(chosen, folder, force=arguments.force)
    return verify_sets(chosen, folder)


def list_sets(folder: Path) -> int:
    from rich.table import Table

    from paceline.terminal import open_console

    table = Table(box=None, pad_edge=False)
    for heading in ("name", "train", "test", "sample", "download", "files"):
        table.add_column(
            heading, justify="right" if heading in ("train", "test", "download") else "left"
        )
    for entry in DATASETS:
        official = OFFICIAL_SETS.get(entry.name)
        if official is None:
            table.add_row(
                entry.usage, "any", "any", "", "none", "yours" if entry.argument else "built in"
            )
            continue
        there = sum((folder / file.path).is_file() for file in official.files)
        table.add_row(
            entry.name,
            f"{official.train_samples:,}",
            f"{official.test_samples:,}",
            "x".join(map(str, official.sample_shape)),
            f"{official.download_bytes / 1e6:,.0f} MB",
            "here" if there == len(official.files) else f"{there} of {len(official.files)} here",
        )
    console = open_console()
    console.print(f"Datasets (files in {folder})", soft_wrap=True)
    console.print(table)
    return 0


class _Bars:
    """A progress bar for each file."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, name: str, done_bytes: int, total_bytes: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total_bytes)
        self._progress.update(self._tasks[name], completed=done_bytes)


def fetch_sets(
    sets: Sequence[DatasetManifest],
    folder: Path,
    *,
    force: bool = False,
    retry: RetryPolicy | None = None,
) -> int:
    """Fetch missing files of `sets`; DataError on failure."""
    from rich import progress as bars
    from rich.console import Console

    from paceline.data.download import fetch

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=16),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    for official in sets:
        if official.terms:
            _print(f"{official.name}: {official.terms}")
        with bars.Progress(*columns, console=Console(stderr=True)) as progress:
            fetched = fetch(official, folder, _Bars(progress), force=force, retry=retry)
        what = f"{fetched} files fetched" if fetched else "all files were here already"
        _print(f"{official.name}: {what}, official, in {folder}")
    return 0


def verify_sets(sets: Sequence[DatasetManifest], folder: Path) -> int:
    """Return 0 if all files can be read, official or not; 2 if one is missing or damaged."""
    return max([_verify(official, folder) for official in sets], default=0)


def _verify(official: DatasetManifest, folder: Path) -> int:
    from paceline.data.checksums import Verdict, verify_file

    verdicts = {file.path: verify_file(file, folder, rehash=True) for file in official.files}
    for path, verdict in verdicts.items():
        _print(f"  {path}: {verdict.value}")
    found = set(verdicts.values())
    if Verdict.MISSING in found:
        where = f"--data-dir {shlex.quote(str(folder))}"
        _print(
            f"{official.name}: missing; get it with `paceline data fetch {official.name} {where}`"
        )
        return 2
    if found == {Verdict.OFFICIAL}:
        _print(f"{official.name}: official")
        return 0
    return _verify_readable(official, folder)


def _verify_readable(official: DatasetManifest, folder: Path) -> int:
    from paceline.data.files import FileDataset
    from paceline.data.manifest import CorruptFileError

    loader = DATASETS.load(official.name)
    if not isinstance(loader, FileDataset):
        raise DataError(f"{official.name} is not read from files")
    try:
        loader.check_readable(folder)
    except CorruptFileError as damage:
        _print(f"{official.name}: damaged; {loader.advice(damage, str(folder))}")
        return 2
    _print(f"{official.name}: readable, but not the official bytes")
    return 0


def _official(name: str) -> DatasetManifest:
    if name in OFFICIAL_SETS:
        return OFFICIAL_SETS[name]
    if name in DATASETS:
        raise DataError(f"{name} has no files; those with files are {', '.join(OFFICIAL_SETS)}")
    raise UnknownNameError(f"unknown dataset {shown(name)}: {suggest(name, OFFICIAL_SETS)}")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
