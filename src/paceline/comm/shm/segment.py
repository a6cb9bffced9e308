"""Memory that several processes of one host see: a file that lives in memory and has no name.

One process makes the file, the others map it, and then its name is removed at once: the kernel
frees the memory when the last process is gone, however it ended. Only processes killed between the
two leave a name behind; whoever makes the next arena removes it (`unlink_stale_segments`).
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
from paceline.errors import UsageError

FOLDER = Path("/dev/shm")
PREFIX = "paceline"
OTHERWISE = "take another --strategy or --communicator"
"""What is left to those who cannot share memory."""
CACHE_LINE_BYTES = 64
"""A cache line. What different workers write lies on different ones."""


class SharedSegment:
    """Collective, with one end on each rank of `communicator`, all on one host.

    Tensors keep the memory alive beyond the arena itself, so there is nothing to close.
    """

    def __init__(self, communicator: Communicator, size_bytes: int) -> None:
        self._map = _share(communicator, max(size_bytes, CACHE_LINE_BYTES))
        self._bytes = memoryview(self._map)

    def tensor(self, begin_byte: int, elements: int, dtype: torch.dtype) -> Tensor:
        """Part of the memory; zeros at first."""
        if elements == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=elements, offset=begin_byte)

    def integers(
        self, begin_byte: int, size_bytes: int, code: Literal["I", "Q"] = "Q"
    ) -> memoryview:
        """The same as whole numbers, of four or eight bytes by their `struct` code."""
        return self._bytes[begin_byte : begin_byte + size_bytes].cast(code)

    def address(self, byte: int) -> int:
        """Where a byte lies in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map, byte))


def aligned_offsets(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Where each of several parts begins, every one on a line of its own, and the size of all."""
    begins, end = [], 0
    for size in sizes_bytes:
        begins.append(end)
        end += -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
    return begins, end


def _share(communicator: Communicator, size_bytes: int) -> mmap.mmap:
    """The first rank makes the file; what keeps one rank from having it is told on all of them."""
    path, problem = None, None
    if communicator.rank == 0:
        try:
            path = _make(size_bytes)
        except OSError as error:
            problem = _explain(error, size_bytes)
    try:
        mapped = _map_everywhere(communicator, str(path), problem, size_bytes)
    finally:
        if path is not None:
            path.unlink()
    if mapped is None:
        raise UsageError(
            "the workers do not share memory: are they in containers or on machines of their own?"
            f" Start each of them with a --node-rank of its own, or {OTHERWISE}"
        )
    return mapped


def _map_everywhere(
    communicator: Communicator, name: str, problem: str | None, size_bytes: int
) -> mmap.mmap | None:
    """The first rank's file; None where a rank does not see it."""
    name, problem = broadcast_json(communicator, [name, problem])
    if problem is not None:
        raise UsageError(problem)
    try:
        mapped = _map(Path(name), size_bytes)
    except OSError:
        mapped = None
    missing = torch.tensor([float(mapped is None)])
    communicator.all_reduce(missing, "control").wait()
    return None if float(missing) else mapped


def _make(size_bytes: int) -> Path:
    unlink_stale_segments()
    path = FOLDER / f"{PREFIX}-{_owner(os.getpid())}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # Takes the memory now, where lack of it is an error; a later lack would kill the process.
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return path


def _map(path: Path, size_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)


def _explain(error: OSError, size_bytes: int) -> str:
    needed = f"{size_bytes / 2**20:,.0f} MiB of shared memory are needed"
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        space = os.statvfs(FOLDER)
        free = space.f_bavail * space.f_frsize / 2**20
        return (
            f"{needed}, but {FOLDER} has {free:,.0f} MiB left: make it larger"
            f" (docker: --shm-size), or {OTHERWISE}"
        )
    return f"{needed}, but {FOLDER} cannot be used ({error.strerror}): {OTHERWISE}"


def unlink_stale_segments() -> None:
    """Names left by processes that were killed while they made an arena; nobody else's."""
    for path in FOLDER.glob(f"{PREFIX}-{pid_namespace()}-*"):
        try:
            owner = "-".join(path.name.split("-")[1:4])
            process = int(path.name.split("-")[2])
            if path.stat().st_uid == os.getuid() and _owner(process) != owner:
                path.unlink()
        except (OSError, ValueError, IndexError):
            continue


def _owner(process: int) -> str:
    """Stands for a process that lives now, and for no later one with the same number."""
    try:
        # The 22nd field is when it started; the second may contain blanks, and ends with ")".
        started = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "gone"
    return f"{pid_namespace()}-{process}-{started}"


def pid_namespace() -> int:
    """Containers may share memory, yet each number its processes by itself."""
    return Path("/proc/self/ns/pid").stat().st_ino
