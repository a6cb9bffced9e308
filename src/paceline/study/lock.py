"""One runner at a time in a study's folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import RecordsError, UsageError
from paceline.study.folder import StudyFolder


@contextmanager
def held(folder: StudyFolder) -> Iterator[None]:
    """Hold the folder's lock; the kernel takes it back when this process ends, however it does."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        file = folder.lock_file.open("a+", encoding="utf-8")
    except OSError as error:
        raise RecordsError(f"cannot write to {folder.path}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another one"
            raise UsageError(
                f"{folder.path} is being run by process {owner}: wait for it, or give another --out"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
        # Emptied, so that a later reader is not told of a process that has gone.
        file.truncate(0)
