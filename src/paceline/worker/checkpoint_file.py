"""One checkpoint on disk: `iteration-00000123.pt`, and its checksum in `iteration-00000123.json`.

The checksum file says what the other one may hold; it is on disk before that gets its name, so that
a checkpoint which can be seen can also be verified, whenever the power fails. While one checkpoint
replaces another of the same iteration, both checksums are listed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import psutil
import torch

from paceline.errors import CheckpointError, DamagedCheckpointError, RecordsError, RunError
from paceline.records import SCHEMA, open_record, read_json, sync_folder, write_json

_NAME = re.compile(r"iteration-(\d{8,})\.(pt|json)")
_TEMPORARY = re.compile(r"\.iteration-\d{8,}\.(?:pt|json)\.(\d+)")
_CHUNK_BYTES = 1 << 20
"""Small enough to be hashed and written while it is in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    iteration: int
    state: dict[str, Any]
    warnings: tuple[str, ...] = ()
    """A line for each newer one that was passed over."""


def state_file(folder: Path, iteration: int) -> Path:
    return folder / f"iteration-{iteration:08d}.pt"


def checksum_file(folder: Path, iteration: int) -> Path:
    return folder / f"iteration-{iteration:08d}.json"


def iterations(folder: Path, suffix: str = "pt") -> list[int]:
    """Those that have a file of this kind, the newest first, whole or not."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    return sorted((int(match[1]) for match in matches if match[2] == suffix), reverse=True)


def write_checkpoint(folder: Path, iteration: int, state: Mapping[str, Any]) -> int:
    """Write one so that it is there whole or not at all; returns its size in bytes.

    A failure leaves no trace but a `RunError` of one line, and every other checkpoint as it was.
    """
    path = state_file(folder, iteration)
    temporary = folder / f".{path.name}.{os.getpid()}"
    size_bytes = 0
    try:
        with temporary.open("wb", buffering=_CHUNK_BYTES) as file:
            hashing = _HashingFile(file)
            torch.save(dict(state), cast("BinaryIO", hashing))  # it calls write and flush alone
            size_bytes = hashing.size_bytes
            hashing.raise_failure()
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path, iteration, {"bytes": size_bytes, "sha256": hashing.hexdigest()})
    except OSError as error:
        _discard(temporary)  # first, so that the free space is told without it
        raise RunError(_explain(error, folder, path, size_bytes)) from error
    finally:
        _discard(temporary)
    return size_bytes


def _publish(temporary: Path, path: Path, iteration: int, content: dict[str, Any]) -> None:
    checksums = checksum_file(path.parent, iteration)
    record = {"schema": SCHEMA, "iteration": iteration}
    replaced: list[dict[str, Any]] = []
    if path.exists():
        with contextlib.suppress(RecordsError, CheckpointError):
            replaced = _contents(checksums, iteration)
    write_json(checksums, {**record, "contents": [*replaced, content]})
    temporary.replace(path)
    sync_folder(path.parent)
    if replaced:
        with contextlib.suppress(OSError):  # the list of both serves as well
            write_json(checksums, {**record, "contents": [content]})


def read_checkpoint(folder: Path, iteration: int) -> dict[str, Any]:
    """The state, if its bytes are those that were written; otherwise a one-line CheckpointError.

    It is a DamagedCheckpointError unless the files could not be read, which may pass.
    """
    path = state_file(folder, iteration)
    try:
        contents = _contents(checksum_file(folder, iteration), iteration)
        with open_record(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes not in [content["bytes"] for content in contents]:
                raise DamagedCheckpointError(
                    f"{path} has {size_bytes} bytes, not the {contents[-1]['bytes']} written"
                )
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if {"bytes": size_bytes, "sha256": digest} not in contents:
                raise DamagedCheckpointError(f"{path} is damaged: its checksum does not agree")
            file.seek(0)
            return _load(path, file)
    except RecordsError as error:
        is_damaged = isinstance(error.__cause__, FileNotFoundError | None)
        kind = DamagedCheckpointError if is_damaged else CheckpointError
        raise kind(f"{path} cannot be verified: {error}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def _load(path: Path, file: BinaryIO) -> dict[str, Any]:
    _check_size(path, file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - what a forged file makes the loader raise is open
        cause = f"{type(error).__name__}: {error}".partition("\n")[0].partition(". ")[0]
        raise DamagedCheckpointError(f"{path} is refused: {cause}") from None
    if not isinstance(state, dict):
        raise DamagedCheckpointError(f"{path} is refused: it holds no state of a run")
    return state


def _check_size(path: Path, file: BinaryIO) -> None:
    """Refuse what would take more memory than its file is long: torch.save compresses nothing."""
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked_bytes = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        raise DamagedCheckpointError(f"{path} is refused: it is not a zip archive") from None
    size_bytes = os.fstat(file.fileno()).st_size
    if unpacked_bytes > size_bytes:
        raise DamagedCheckpointError(
            f"{path} is refused: it holds {unpacked_bytes} bytes, more than the file's {size_bytes}"
        )
    file.seek(0)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest that verifies, None where there never was one.

    Those that cannot be used are passed over. If none can, that is a CheckpointError: to begin anew
    is for the user to decide. It is a DamagedCheckpointError if every one is damaged.
    """
    warnings: list[str] = []
    is_damaged = True
    for iteration in iterations(folder):
        try:
            return Checkpoint(iteration, read_checkpoint(folder, iteration), tuple(warnings))
        except CheckpointError as error:
            warnings.append(f"checkpoint of iteration {iteration} is passed over: {error}")
            is_damaged = is_damaged and isinstance(error, DamagedCheckpointError)
    if warnings:
        raise (DamagedCheckpointError if is_damaged else CheckpointError)(
            f"none of the {len(warnings)} checkpoints in {folder} can be used: {warnings[0]}"
        )
    return None


def remove_checkpoint(folder: Path, iteration: int) -> None:
    # In this order a crash in between leaves a checksum alone, which nobody takes for a checkpoint.
    for path in (state_file(folder, iteration), checksum_file(folder, iteration)):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"cannot remove the old checkpoint {path}: {error.strerror}") from error


def remove_stale_temporaries(folder: Path) -> None:
    """Remove what processes that died while writing left here."""
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            try:
                # Pids come again, above all in containers: a file from before a process's birth
                # is not that process's. A second allows for the clocks' different resolutions.
                born = psutil.Process(int(match[1])).create_time()
                stale = path.stat().st_mtime < born - 1
            except psutil.NoSuchProcess:
                stale = True
            if stale:
                path.unlink()


def _contents(checksums: Path, iteration: int) -> list[dict[str, Any]]:
    """What the state's file may hold: size and SHA-256 of each possibility."""
    record = read_json(checksums)
    contents = record.get("contents")
    whole = isinstance(contents, list) and all(
        isinstance(content, dict) and {"bytes", "sha256"} <= content.keys() for content in contents
    )
    if not contents or not whole or record.get("iteration") != iteration:
        raise DamagedCheckpointError(f"{checksums} is not the checksum of iteration {iteration}")
    found: list[dict[str, Any]] = contents
    return found


def _explain(error: OSError, folder: Path, path: Path, size_bytes: int) -> str:
    parts = [f"cannot write checkpoint {path}: {error.strerror or error}"]
    with contextlib.suppress(OSError):
        parts.append(_explain_space(error, folder, size_bytes))
    standing = iterations(folder)
    parts.append(
        f"{state_file(folder, standing[0]).name} is still there"
        if standing
        else "there is no earlier checkpoint"
    )
    return "; ".join(parts)


def _explain_space(error: OSError, folder: Path, size_bytes: int) -> str:
    """What a checkpoint needs and what is free, both as the file system counts them."""
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    if not size_bytes:
        return f"{free_bytes} bytes are free"
    # Files take whole blocks; the checksum is a second file, and the folder may need one as well.
    blocks = -(-size_bytes // disk.f_frsize) + 2
    needed = f"it needs {blocks * disk.f_frsize} bytes with its checksum, and {free_bytes} are free"
    if blocks <= disk.f_bavail and error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed += " now: check quotas, inodes and what else fills the disk"
    return needed


def _discard(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


class _HashingFile:
    """Passes what is written on to a file, hashing it on the way.

    A failure is kept for `raise_failure`, and what follows it is only counted: an exception must
    not pass through the C++ writer that calls this, and the count tells how much space would do.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.size_bytes = 0
        self._file = file
        self._digest = hashlib.sha256()
        self._failure: OSError | None = None

    def write(self, data: memoryview | bytes) -> int:
        view = memoryview(data)
        self.size_bytes += view.nbytes
        for start in range(0, view.nbytes, _CHUNK_BYTES):
            if self._failure is not None:
                break
            chunk = view[start : start + _CHUNK_BYTES]
            self._digest.update(chunk)
            try:
                self._file.write(chunk)
            except OSError as error:
                self._failure = error
        return view.nbytes

    def flush(self) -> None:
        """Nothing yet: the caller flushes and syncs once, at the end."""

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
