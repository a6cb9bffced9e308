"""One runner at a time in a study's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import RecordsError
from paceline.folder_lock import locked
from paceline.records import make_folder
from paceline.study.folder import StudyFolder


@contextmanager
def held(folder: StudyFolder) -> Iterator[None]:
    """Hold the folder's lock; the kernel takes it back when this process ends, however it does.

    A cell that it has started then holds it on, for the moments in which it writes what it has.
    """
    try:
        make_folder(folder.path)
    except OSError as error:
        raise RecordsError(f"cannot write to {folder.path}: {error.strerror}") from None
    with locked(folder.path, "wait for it, or give another --out", is_inherited=True):
        yield
