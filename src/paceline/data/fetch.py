"""Fetch all files of a dataset that are not there yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.data.catalogue import FOLDER_VARIABLE, OfficialFile, OfficialSet
from paceline.data.checksums import Verdict, judge, keep_official
from paceline.data.damage import DamageError
from paceline.data.download import NowhereError, Patience, download
from paceline.data.unpack import unpack
from paceline.errors import DataError

Watcher = Callable[[str, int, int], None]
"""Is told a file's name, how many of its bytes are there, and how many there will be."""


def fetch(
    official: OfficialSet,
    folder: Path,
    watch: Watcher,
    *,
    force: bool = False,
    patience: Patience | None = None,
) -> int:
    """Bring a set's files to `folder`; returns how many were not official before.

    A file that is there and is not the official one is replaced only with `force`: it may be the
    only copy of somebody's own version.
    """
    try:
        verdicts = {file: judge(file, folder) for file in official.files}
    except OSError as error:
        raise DataError(f"cannot read {error.filename or folder}: {error.strerror}") from None
    others = [file.path for file, verdict in verdicts.items() if verdict is Verdict.OTHER]
    if others and not force:
        raise DataError(
            f"{folder / others[0]} is there and is not the official file: "
            "--force replaces it, `paceline data verify` tells whether it can be read"
        )
    needed = [file for file, verdict in verdicts.items() if verdict is not Verdict.OFFICIAL]

    def bring(file: OfficialFile) -> Path:
        target = folder / file.path
        try:
            download(file, target, lambda done: watch(target.name, done, file.size_bytes), patience)
        except NowhereError as error:
            raise DataError(f"{error}; {_by_hand(official, folder)}") from None
        return target

    if needed and official.archive is not None:
        _from_archive(official.archive, needed, folder, bring)
    else:
        for file in needed:
            bring(file)
    for file in needed:
        keep_official(file, folder)
    return len(needed)


def _by_hand(official: OfficialSet, folder: Path) -> str:
    """What whoever has no network can do."""
    where = f"by hand into {folder} (or set --data-dir or {FOLDER_VARIABLE})"
    check = f"`paceline data verify {official.name}`"
    if official.archive is None:
        names = ", ".join(file.path for file in official.files)
        return f"put {names} {where} and run {check}"
    again = f"`paceline data fetch {official.name}`, which unpacks it"
    return f"put {official.archive.path} {where} and run {again}, then {check}"


def _from_archive(
    archive: OfficialFile,
    needed: list[OfficialFile],
    folder: Path,
    bring: Callable[[OfficialFile], Path],
) -> None:
    path = folder / archive.path
    ours = judge(archive, folder) is not Verdict.OFFICIAL
    if ours:
        bring(archive)
    try:
        unpack(path, needed, folder)
    except DamageError as damage:
        raise DataError(f"{damage}: delete it and fetch again") from None
    # An archive that somebody put there stays; one fetched for this has done its work.
    if ours:
        path.unlink(missing_ok=True)
