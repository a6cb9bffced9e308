"""Checkpoints: file format, and the store that keeps the newest ones.

A checkpoint is `iteration-00000123.pt` with its checksum in `iteration-00000123.json`. The checksum
is on disk before the state file gets its name, so every visible checkpoint can be verified, even
after a power failure. While a checkpoint replaces another of the same iteration, the checksum file
lists both. The state consists of plain containers and CPU tensors.

In order: the store, then the format (names, writing, reading, removing). training/snapshot.py
copies the state that is written.
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
from threading import Thread
from time import perf_counter
from typing import Any, BinaryIO, cast

import psutil
import torch

from paceline.errors import (
    CheckpointError,
    DamagedCheckpointError,
    DamagedRecordError,
    MissingRecordError,
    RecordsError,
    RunError,
)
from paceline.records import SCHEMA, make_folder, open_record, read_json, sync_folder, write_json
from paceline.training.snapshot import Snapshot, SnapshotBuffers, without_copy

__all__ = ["Checkpoint", "CheckpointStore", "iterations", "newest_checkpoint"]

_NAME = re.compile(r"iteration-(\d{8,})\.(pt|json)")
_TEMPORARY = re.compile(r"\.iteration-\d{8,}\.(?:pt|json)\.(\d+)")
_CHUNK_BYTES = 1 << 20
"""Small enough to be hashed and written while it is in the CPU cache."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    iteration: int
    state: dict[str, Any]
    warnings: tuple[str, ...] = ()
    """One line per newer checkpoint that was skipped."""


class CheckpointStore:
    """Writes the checkpoints of a run; only rank 0 has a store.

    Other processes read with `newest_checkpoint`. A failed write raises `RunError`; in background
    mode, the next call of `save`, `newest` or `close` raises it.
    """

    def __init__(self, folder: Path, keep: int, mode: str) -> None:
        if keep < 1 or mode not in ("sync", "background"):
            raise ValueError(f"keep={keep} must be 1 or more, mode={mode!r} sync or background")
        self.folder = folder
        self.count = 0
        self.bytes = 0
        """Written so far, including checkpoints that were removed."""
        self.blocked_seconds = 0.0
        """Time in `save` and `close`, which block training."""
        self.background_seconds = 0.0
        """Time of background writes."""
        self._keep = keep
        self._buffers = SnapshotBuffers() if mode == "background" else None
        self._writer: Thread | None = None
        self._failure: BaseException | None = None
        self._reached: int | None = None
        """The iteration last saved, or last returned by `newest`."""
        self._unwritten: tuple[int, Snapshot] | None = None
        """The checkpoint that the background thread failed to write."""
        try:
            make_folder(folder)
            remove_stale_temporaries(folder)
        except OSError as error:
            raise RunError(f"cannot write checkpoints to {folder}: {error.strerror}") from error

    @property
    def extra_memory_bytes(self) -> int:
        """Host memory for the copies of background writes; 0 in sync mode."""
        return self._buffers.host_bytes if self._buffers else 0

    @property
    def extra_gpu_memory_bytes(self) -> int:
        """Peak GPU memory for the copies of background writes; 0 in sync mode."""
        return self._buffers.clone_bytes if self._buffers else 0

    def restore(self, totals: Mapping[str, Any], iteration: int, blocked_seconds: float) -> None:
        """Continue the totals of a run that resumes from the checkpoint of `iteration`."""
        self.count += totals.get("count", 0) + 1
        with contextlib.suppress(OSError):
            self.bytes += state_file(self.folder, iteration).stat().st_size
        self.bytes += totals.get("bytes", 0)
        self.blocked_seconds += totals.get("blocked_seconds", 0.0) + blocked_seconds
        self.background_seconds += totals.get("background_seconds", 0.0)

    def save(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Write the state after `iteration`, then remove the oldest checkpoints.

        In background mode it returns when the previous write has ended and the state may change: a
        snapshot of it is taken (training/snapshot.py).
        """
        began = perf_counter()
        try:
            if self._buffers is None:
                self._write(iteration, without_copy(state))
                return
            self._wait()
            # The new copy overwrites the previous one.
            self._unwritten = None
            snapshot = self._buffers.take(state)
            self._writer = Thread(
                target=self._write_in_background,
                args=(iteration, snapshot),
                name="checkpoint writer",
            )
            self._writer.start()
        finally:
            self.blocked_seconds += perf_counter() - began

    def newest(self) -> Checkpoint | None:
        """Return the newest valid checkpoint; see `newest_checkpoint`."""
        self._wait()
        checkpoint = newest_checkpoint(self.folder)
        if checkpoint is not None:
            self._reached = checkpoint.iteration
        return checkpoint

    def close(self) -> None:
        """Wait for background writes; the store can be used again afterwards."""
        began = perf_counter()
        try:
            self._wait()
        finally:
            self.blocked_seconds += perf_counter() - began

    def write_again(self) -> int | None:
        """Repeat a failed background write in this thread; returns its iteration, or None.

        Call it after `close`, whether or not that raised.
        """
        if self._unwritten is None:
            return None
        began = perf_counter()
        try:
            iteration, snapshot = self._unwritten
            self._write(iteration, snapshot.in_host_memory())
        finally:
            self.blocked_seconds += perf_counter() - began
        self._unwritten = None
        return iteration

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write_in_background(self, iteration: int, snapshot: Snapshot) -> None:
        began = perf_counter()
        try:
            self._write(iteration, snapshot.in_host_memory())
            self._unwritten = None
        except BaseException as error:  # noqa: BLE001 - raised in the training thread by _wait
            self._failure = error
            self._unwritten = (iteration, snapshot)
        self.background_seconds += perf_counter() - began

    def _write(self, iteration: int, state: Mapping[str, Any]) -> None:
        self.bytes += write_checkpoint(self.folder, iteration, state)
        self.count += 1
        kept = self._lineage(iteration)[: self._keep]
        known = {*iterations(self.folder), *iterations(self.folder, suffix="json")}
        for other in known.difference(kept):
            remove_checkpoint(self.folder, other)
        self._reached = iteration

    def _lineage(self, iteration: int) -> list[int]:
        """Return the checkpoints that led to this one, newest first.

        Others, newer than the one the run resumed from, were damaged at that time. They do not
        count, so that they do not displace intact ones.
        """
        return [
            other
            for other in iterations(self.folder)
            if other == iteration
            or (other < iteration and (self._reached is None or other <= self._reached))
        ]


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest valid checkpoint, or None if there are no checkpoints.

    Unusable checkpoints are skipped. If none is usable, it raises CheckpointError, because the user
    must decide whether to start over; DamagedCheckpointError if all are damaged.
    """
    warnings: list[str] = []
    is_damaged = True
    for iteration in iterations(folder):
        try:
            return Checkpoint(iteration, read_checkpoint(folder, iteration), tuple(warnings))
        except CheckpointError as error:
            warnings.append(f"checkpoint of iteration {iteration} was skipped: {error}")
            is_damaged = is_damaged and isinstance(error, DamagedCheckpointError)
    if warnings:
        raise (DamagedCheckpointError if is_damaged else CheckpointError)(
            f"none of the {len(warnings)} checkpoints in {folder} can be used: {warnings[0]}"
        )
    return None


def iterations(folder: Path, suffix: str = "pt") -> list[int]:
    """Return the iterations that have a file of this kind, newest first, intact or not."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    return sorted((int(match[1]) for match in matches if match[2] == suffix), reverse=True)


def state_file(folder: Path, iteration: int) -> Path:
    return folder / f"iteration-{iteration:08d}.pt"


def checksum_file(folder: Path, iteration: int) -> Path:
    return folder / f"iteration-{iteration:08d}.json"


def write_checkpoint(folder: Path, iteration: int, state: Mapping[str, Any]) -> int:
    """Write a checkpoint atomically; returns its size in bytes.

    If writing fails, it raises a one-line `RunError` and leaves other checkpoints unchanged.
    """
    path = state_file(folder, iteration)
    temporary = folder / f".{path.name}.{os.getpid()}"
    size_bytes = 0
    try:
        with temporary.open("wb", buffering=_CHUNK_BYTES) as file:
            hashing = _HashingFile(file)
            torch.save(dict(state), cast("BinaryIO", hashing))  # only calls write and flush
            size_bytes = hashing.size_bytes
            hashing.raise_failure()
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path, iteration, {"bytes": size_bytes, "sha256": hashing.hexdigest()})
    except OSError as error:
        _discard(temporary)  # first, so that the reported free space excludes it
        raise RunError(_explain(error, folder, path, size_bytes)) from error
    finally:
        _discard(temporary)
    return size_bytes


class _HashingFile:
    """Hashes everything that is written to a file.

    After a failure, which `raise_failure` raises, it only counts bytes: an exception must not pass
    through the C++ writer that calls this, and the count gives the needed disk space.
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
        """Do nothing: the caller flushes and syncs once at the end."""

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


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
        with contextlib.suppress(OSError):  # a list of both is also valid
            write_json(checksums, {**record, "contents": [content]})


def _discard(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


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
    """Return the needed and the free disk space, as the file system counts them."""
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    if not size_bytes:
        return f"{free_bytes} bytes are free"
    # Files take whole blocks, and the checksum file and the folder may need one each.
    blocks = -(-size_bytes // disk.f_frsize) + 2
    needed = f"it needs {blocks * disk.f_frsize} bytes with its checksum, and {free_bytes} are free"
    if blocks <= disk.f_bavail and error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed += " now: check quotas, inodes and what else fills the disk"
    return needed


def read_checkpoint(folder: Path, iteration: int) -> dict[str, Any]:
    """Verify and load the state of a checkpoint; raises a one-line CheckpointError.

    It raises DamagedCheckpointError unless a retry or a newer version could read the files.
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
    except (MissingRecordError, DamagedRecordError) as error:
        raise DamagedCheckpointError(f"{path} cannot be verified: {error}") from None
    except RecordsError as error:
        raise CheckpointError(f"{path} cannot be verified: {error}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def _contents(checksums: Path, iteration: int) -> list[dict[str, Any]]:
    """Return size and SHA-256 of each content that the state file may have."""
    record = read_json(checksums)
    contents = record.get("contents")
    whole = isinstance(contents, list) and all(
        isinstance(content, dict) and {"bytes", "sha256"} <= content.keys() for content in contents
    )
    if not contents or not whole or record.get("iteration") != iteration:
        raise DamagedCheckpointError(f"{checksums} is not the checksum of iteration {iteration}")
    found: list[dict[str, Any]] = contents
    return found


def _load(path: Path, file: BinaryIO) -> dict[str, Any]:
    _check_size(path, file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a forged file can make the loader raise anything
        cause = f"{type(error).__name__}: {error}".partition("\n")[0].partition(". ")[0]
        raise DamagedCheckpointError(f"{path} is rejected: {cause}") from None
    if not isinstance(state, dict):
        raise DamagedCheckpointError(f"{path} is rejected: it does not contain the state of a run")
    return state


def _check_size(path: Path, file: BinaryIO) -> None:
    """Reject a file that unpacks to more than its own size: torch.save does not compress."""
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked_bytes = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        raise DamagedCheckpointError(f"{path} is rejected: it is not a zip archive") from None
    size_bytes = os.fstat(file.fileno()).st_size
    if unpacked_bytes > size_bytes:
        raise DamagedCheckpointError(
            f"{path} is rejected: it unpacks to {unpacked_bytes} bytes, more than its size of"
            f" {size_bytes}"
        )
    file.seek(0)


def remove_checkpoint(folder: Path, iteration: int) -> None:
    # In this order, a crash in between leaves only a checksum, which is not taken for a checkpoint.
    for path in (state_file(folder, iteration), checksum_file(folder, iteration)):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"cannot remove the old checkpoint {path}: {error.strerror}") from error


def remove_stale_temporaries(folder: Path) -> None:
    """Remove temporary files of processes that died while writing."""
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            try:
                # Pids are reused, especially in containers: a file older than the process is not
                # its own. One second allows for different clock resolutions.
                born = psutil.Process(int(match[1])).create_time()
                stale = path.stat().st_mtime < born - 1
            except psutil.NoSuchProcess:
                stale = True
            if stale:
                path.unlink()
