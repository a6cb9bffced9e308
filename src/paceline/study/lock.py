"""One runner at a time in a study's folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paceline.errors import RecordsError, UsageError
from paceline.study.folder import StudyFolder


@contextmanager
def held(folder: StudyFolder) -> Iterator[None]:
    """Hold the folder's lock; the kernel takes it back when this process ends, however it does.

    A cell that it has started then holds it on, for the moments in which it writes what it has.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        file = folder.lock_file.open("ab+", buffering=0)
    except OSError as error:
        raise RecordsError(f"cannot write to {folder.path}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            number = file.read().decode().strip()
            owner = f"process {number}" if number else "another process"
            raise UsageError(
                f"{folder.path} is being run by {owner}: wait for it, or give another --out"
            ) from None
        os.set_inheritable(file.fileno(), True)
        file.truncate(0)
        # On a full disk it stays empty: the runner itself will say that it cannot write.
        with suppress(OSError):
            file.write(f"{os.getpid()}\n".encode())
        yield
        # Emptied, so that a later reader is not told of a process that has gone.
        file.truncate(0)
