"""A run's folder on its way from one machine to another: a stream of its files.

`python -m paceline.launch.parcel send` writes a folder to standard output and `... take` fills one
from standard input; the first line of the input says which (launch/starter.py), and the first line
of the answer how it stands with it. What is sent are regular files with plain names, whatever else
the other side may say.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from paceline.config import RunConfig, fields, from_mapping, option_of
from paceline.errors import RecordsError
from paceline.launch.starter import read_given, telling_errors
from paceline.records import RunFolder

MOST_LEVELS = 6
"""How deep a run's folders are nested; far less is used."""
PASSING = ("launch-", "failure-")
"""Names of files that are only of use while a run goes on."""

Progress = Callable[[int], None]
"""Told the bytes that have come so far."""


def files_of(folder: Path) -> Iterator[Path]:
    """The files of a run, relative to its folder."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in name.parts)
        is_regular = path.is_file() and not path.is_symlink()
        if is_regular and not is_hidden and not path.name.startswith(PASSING):
            yield name


def size_of(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in files_of(folder))


def pack(folder: Path, out: IO[bytes]) -> None:
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name in files_of(folder):
            with (folder / name).open("rb") as file:
                entry = tarfile.TarInfo(str(PurePosixPath(name)))
                entry.size = os.fstat(file.fileno()).st_size
                # A file that still grows is sent as long as it was.
                archive.addfile(entry, file)


def unpack(source: IO[bytes], folder: Path, progress: Progress, replace: bool = True) -> int:
    """Write what comes into a folder, each file whole or not at all; returns how many there were.

    Without `replace`, files that are there already stay as they are. Of what is only ever appended
    to, the longer one is kept in any case: the other would be an older state of the same file.
    """
    count = done = 0
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for entry in archive:
                contents = archive.extractfile(entry) if entry.isreg() else None
                if contents is None or not is_plain(entry.name):
                    raise RecordsError(f"a run has no file such as {entry.name!r}: not taken")
                target = folder / entry.name
                if _is_wanted(target, entry.size, replace):
                    _write(target, contents)
                    count += 1
                done += entry.size
                progress(done)
    except (tarfile.TarError, ValueError, EOFError) as error:
        # A forged header makes the module raise more than its own errors.
        raise RecordsError(f"the records came damaged or not at all ({error})") from None
    except OSError as error:
        raise RecordsError(f"cannot write to {folder}: {error.strerror or error}") from None
    return count


def _is_wanted(target: Path, size_bytes: int, replace: bool) -> bool:
    if target.suffix == ".jsonl" and target.exists():
        return target.stat().st_size < size_bytes
    return replace or not target.exists()


def is_plain(name: str) -> bool:
    """Whether a name stays inside the folder that it is put into."""
    parts = name.split("/")
    return len(parts) <= MOST_LEVELS and all(
        part and part.isprintable() and not part.startswith(".") and "\\" not in part
        for part in parts
    )


def _write(target: Path, contents: IO[bytes]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    try:
        with part.open("wb") as file:
            shutil.copyfileobj(contents, file)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def main(action: str) -> None:
    """On the other machine: `send` or `take` the folder that the first line of the input names.

    It holds `folder`, a path as that machine sees it; `identity`, that of the starter's folder, or
    None; and for `take` the run's `config`. The answer holds `state`: same (nothing follows),
    absent, other (there is another run) or ready.
    """
    given = read_given()
    folder = RunFolder(Path(given["folder"]))
    state = _state(folder, given)
    size = size_of(folder.path) if state == "ready" and action == "send" else 0
    answer = {"state": state, "bytes": size, "path": str(folder.path.absolute())}
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()
    if action == "send" and state == "ready":
        pack(folder.path, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    elif action == "take" and state in ("ready", "absent"):
        # A run that goes on there is not to be written over.
        with folder.locked() if state == "ready" else contextlib.nullcontext():
            unpack(sys.stdin.buffer, folder.path, lambda _: None)


def _state(folder: RunFolder, given: dict[str, Any]) -> str:
    if not folder.config_file.is_file():
        return "absent"
    if folder.identity() == given["identity"]:
        return "same"
    wanted = given.get("config")
    if wanted is not None and not _are_of_one_run(folder.read_config(), from_mapping(wanted)):
        return "other"
    return "ready"


def _are_of_one_run(one: RunConfig, other: RunConfig) -> bool:
    """By all that a run keeps when it is resumed, but for the place of its folder."""
    return all(
        getattr(one, item.name) == getattr(other, item.name)
        for item in fields()
        if not option_of(item).may_change
        and item.name not in ("out", "name", "batch_size", "batch_per_worker")
    )


if __name__ == "__main__":
    sys.exit(telling_errors(lambda: main(sys.argv[1])))
