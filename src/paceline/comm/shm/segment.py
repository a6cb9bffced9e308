"""Shared-memory segments: memory mapped by several processes of one node.

A segment is a file in /dev/shm. Rank 0 creates it, all ranks map it, and rank 0 unlinks it
immediately afterward. The kernel frees the memory when the last process exits, no matter how. Only
processes that are killed between these steps leave a file behind, and the next process that creates
a segment removes it (`unlink_stale_segments`).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json
from paceline.errors import SharedMemoryUnavailableError

FOLDER = Path("/dev/shm")
PREFIX = "paceline"
HINT = "choose another --strategy or --communicator"
"""Advice for users whose ranks cannot share memory."""
CACHE_LINE_BYTES = 64
"""Ranks write to different cache lines to avoid false sharing."""


class SharedSegment:
    """Zero-initialized memory that all ranks of a communicator share. Creating it is collective.

    Tensors keep the memory mapped after this object is deleted, so there is no `close`.
    """

    def __init__(self, communicator: Communicator, size_bytes: int) -> None:
        self._map = _create_and_map(communicator, max(size_bytes, CACHE_LINE_BYTES))
        self._bytes = memoryview(self._map)

    def tensor(self, begin_byte: int, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a range of the segment as a tensor."""
        if elements == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=elements, offset=begin_byte)

    def integers(
        self, begin_byte: int, size_bytes: int, code: Literal["I", "Q"] = "Q"
    ) -> memoryview:
        """Return a range of the segment as unsigned integers of 4 ("I") or 8 ("Q") bytes."""
        return self._bytes[begin_byte : begin_byte + size_bytes].cast(code)

    def address(self, byte: int) -> int:
        """Return the address of a byte in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map, byte))


def aligned_offsets(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Lay out blocks of these sizes on cache-line boundaries; return offsets and total size."""
    begins, end = [], 0
    for size in sizes_bytes:
        begins.append(end)
        end += -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
    return begins, end


def _create_and_map(communicator: Communicator, size_bytes: int) -> mmap.mmap:
    """Create the file on rank 0 and map it on all ranks; if one rank fails, all ranks raise."""
    path, failure = None, None
    if communicator.rank == 0:
        try:
            path = create_file(size_bytes)
        except OSError as error:
            failure = _reason_and_hint(error, size_bytes)
    try:
        mapped = _map_on_all_ranks(communicator, str(path), failure, size_bytes)
    finally:
        if path is not None:
            path.unlink()
    if mapped is None:
        raise SharedMemoryUnavailableError(
            "workers cannot share memory"
            " (are they in separate containers or on separate machines?)",
            f"start each container or machine with its own --node-rank, or {HINT}",
        )
    return mapped


def _map_on_all_ranks(
    communicator: Communicator, name: str, failure: tuple[str, str] | None, size_bytes: int
) -> mmap.mmap | None:
    """Map the file of rank 0; return None if a rank cannot open it."""
    name, failure = broadcast_json(communicator, [name, failure])
    if failure is not None:
        raise SharedMemoryUnavailableError(*failure)
    try:
        mapped = map_file(Path(name), size_bytes)
    except OSError:
        mapped = None
    missing = torch.tensor([float(mapped is None)])
    communicator.all_reduce(missing, "control").wait()
    return None if float(missing) else mapped


def create_file(size_bytes: int) -> Path:
    """Create a file of zeros that other processes of this node can map; the caller unlinks it."""
    unlink_stale_segments()
    path = FOLDER / f"{PREFIX}-{_owner(os.getpid())}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # Allocate now, so that insufficient space raises an error here instead of SIGBUS later.
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return path


def map_file(path: Path, size_bytes: int) -> mmap.mmap:
    """Map a file of `create_file`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)


def _reason_and_hint(error: OSError, size_bytes: int) -> tuple[str, str]:
    required = f"the run requires {size_bytes / 2**20:,.0f} MiB of shared memory"
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        space = os.statvfs(FOLDER)
        free_mib = space.f_bavail * space.f_frsize / 2**20
        return (
            f"{required}, but {FOLDER} has {free_mib:,.0f} MiB free",
            f"increase its size (docker: --shm-size), or {HINT}",
        )
    return f"{required}, but {FOLDER} is not usable ({error.strerror})", HINT


def unlink_stale_segments() -> None:
    """Unlink segments left behind by killed processes of this user in this PID namespace."""
    for path in FOLDER.glob(f"{PREFIX}-{pid_namespace()}-*"):
        try:
            owner = "-".join(path.name.split("-")[1:4])
            process = int(path.name.split("-")[2])
            if path.stat().st_uid == os.getuid() and _owner(process) != owner:
                path.unlink()
        except (OSError, ValueError, IndexError):
            continue


def _owner(process: int) -> str:
    """Return an identifier of a process that stays unique if its PID is reused."""
    try:
        # Field 22 is the start time; field 2 may contain spaces and ends with ")".
        started = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "gone"
    return f"{pid_namespace()}-{process}-{started}"


def pid_namespace() -> int:
    """Return the PID namespace, which may differ between containers that share memory."""
    return Path("/proc/self/ns/pid").stat().st_ino
