"""An exclusive lock on a folder; the kernel releases it when its owner exits.

It is a flock on the file `.lock`, which contains the process id and host of the owner. On a shared
file system it works between machines if flock does, as on NFS.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import RecordsError, UsageError

LOCK_FILE = ".lock"
ATTEMPTS = 100
"""Retries if other processes remove the file at the same time."""
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)

logger = logging.getLogger("paceline")

_own_descriptors: set[int] = set()
"""Descriptors of locks that forked children must close."""


def _close_in_child() -> None:
    # A forked child shares the lock, and would keep it until it exits.
    for descriptor in _own_descriptors:
        with suppress(OSError):
            os.close(descriptor)
    _own_descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked(folder: Path, advice: str, *, is_inherited: bool = False) -> Iterator[None]:
    """Hold the lock of an existing folder; if it is taken, a UsageError has the owner and `advice`.

    With `is_inherited`, child processes that inherit open files keep the lock until they exit.
    Otherwise no child process keeps it.
    """
    process = os.getpid()
    try:
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise RecordsError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        descriptor = _lock(folder, directory, advice)
        try:
            os.set_inheritable(descriptor, is_inherited)
            if not is_inherited:
                _own_descriptors.add(descriptor)
            # On a full disk it stays empty: the next write reports the error.
            with suppress(OSError):
                os.truncate(descriptor, 0)
                os.write(descriptor, f"{process} {socket.gethostname()}\n".encode())
            yield
        finally:
            # A forked child that leaves the block does not own the lock.
            if os.getpid() == process:
                _release(descriptor, directory, is_inherited)
    finally:
        os.close(directory)


def is_in_use(folder: Path) -> bool:
    """Whether a running process of this host holds the lock; does not touch the lock."""
    try:
        words = (folder / LOCK_FILE).read_text(errors="replace").split()
    except OSError:
        return False
    return words[1:] == [socket.gethostname()] and _is_running(words[0])


def _release(descriptor: int, directory: int, is_inherited: bool) -> None:
    with suppress(OSError):
        os.truncate(descriptor, 0)
        # A child may still hold the lock: then the file must stay.
        if not is_inherited and _is_current(descriptor, directory):
            os.unlink(LOCK_FILE, dir_fd=directory)
    _own_descriptors.discard(descriptor)
    os.close(descriptor)


def _lock(folder: Path, directory: int, advice: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    for _ in range(ATTEMPTS):
        try:
            descriptor = os.open(LOCK_FILE, flags, 0o666, dir_fd=directory)
        except OSError as error:
            raise RecordsError(f"cannot write to {folder}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(descriptor)
            os.close(descriptor)
            raise UsageError(f"{folder} is in use by {owner}: {advice}") from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                os.close(descriptor)
                raise RecordsError(f"cannot lock {folder}: {error.strerror}") from None
            logger.warning(
                "%s cannot be locked (%s): do not start the run twice", folder, error.strerror
            )
            return descriptor
        # The last owner may have removed the file between the two calls.
        if _is_current(descriptor, directory):
            return descriptor
        os.close(descriptor)
    raise RecordsError(f"cannot lock {folder}: {LOCK_FILE} keeps being replaced")


def _is_current(descriptor: int, directory: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(LOCK_FILE, dir_fd=directory))
    except FileNotFoundError:
        return False


def _owner(descriptor: int) -> str:
    words = os.pread(descriptor, 1000, 0).decode(errors="replace").split()
    if not words:
        return "another process"
    process = f"process {words[0]}" + (f" on {words[1]}" if len(words) > 1 else "")
    has_ended = words[1:] == [socket.gethostname()] and not _is_running(words[0])
    return f"a child of {process}, which has ended" if has_ended else process


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except PermissionError:
        return True
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    return True
