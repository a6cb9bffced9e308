"""Storage of a split: in memory, or memory-mapped from a file of decoded images.

The file holds one page that describes its sources, then the images, then the labels (one byte
each). It is written under a temporary name and renamed when complete.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.dataset import Split
from paceline.data.manifest import check_free_space
from paceline.errors import DataError

Chunk = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Images (samples, channels, height, width) and their labels."""

_MAGIC = b"paceline decoded images 1\n"
_PAGE_BYTES = 4096
_LOCK_TIMEOUT_SECONDS = 900.0
_LOCK_POLL_SECONDS = 0.2


def resident_split(chunks: Iterable[Chunk], samples: int, shape: tuple[int, ...]) -> Split:
    """Read chunks, which hold exactly `samples` samples in total, into memory."""
    images = torch.empty((samples, *shape), dtype=torch.uint8)
    labels = torch.empty(samples, dtype=torch.uint8)
    images_out, labels_out = images.numpy(), labels.numpy()
    filled = 0
    for some_images, some_labels in chunks:
        images_out[filled : filled + len(some_images)] = some_images
        labels_out[filled : filled + len(some_labels)] = some_labels
        filled += len(some_labels)
    return Split(images, labels)


def mapped_split(
    cache: Path,
    sources: Sequence[Path],
    chunks: Callable[[], Iterator[Chunk]],
    samples: int,
    shape: tuple[int, ...],
) -> Split:
    """Map a split from the file `cache`, which is written first unless it matches the sources.

    One process writes it while the others on the machine wait. The mapping is private: writing to
    the tensor does not change the file.
    """
    page = _describe(sources, samples, shape)
    image_bytes = samples * math.prod(shape)
    size_bytes = _PAGE_BYTES + image_bytes + samples

    def is_current(path: Path) -> bool:
        return _starts_with(path, page, size_bytes)

    if not is_current(cache):
        advice = "use fewer --train-samples or another --data-dir"
        check_free_space(cache.parent, image_bytes + samples, advice)
        try:
            build_once(cache, lambda file: _write_images(file, page, chunks()), is_current)
        except OSError as error:
            raise DataError(
                f"cannot write {cache}, needed for datasets above --resident-limit-mib: "
                f"{error.strerror}; free disk space or raise the limit"
            ) from None
    mapped = torch.from_file(str(cache), shared=False, size=size_bytes, dtype=torch.uint8)
    images = mapped[_PAGE_BYTES : _PAGE_BYTES + image_bytes].view(samples, *shape)
    return Split(images, mapped[_PAGE_BYTES + image_bytes :])


def _describe(sources: Sequence[Path], samples: int, shape: tuple[int, ...]) -> bytes:
    """Return the first page of the file, which changes whenever a source changes."""
    files = []
    for source in sources:
        status = source.stat()
        files.append([source.name, status.st_size, status.st_mtime_ns])
    text = _MAGIC + json.dumps({"sources": files, "samples": samples, "shape": shape}).encode()
    return text.ljust(_PAGE_BYTES, b"\n")


def _starts_with(path: Path, page: bytes, size_bytes: int) -> bool:
    """Return whether a file exists, has this size and starts with this page."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == size_bytes and file.read(len(page)) == page
    except OSError:
        return False


def _write_images(file: BinaryIO, page: bytes, chunks: Iterator[Chunk]) -> None:
    labels = []
    file.write(page)
    for some_images, some_labels in chunks:
        file.write(np.ascontiguousarray(some_images).data)
        labels.append(some_labels.tobytes())
    file.write(b"".join(labels))


def build_once(
    path: Path,
    write: Callable[[BinaryIO], None],
    is_current: Callable[[Path], bool] = Path.exists,
) -> None:
    """Create a file unless it is current: one process writes it, others on the machine wait.

    `write` gets a temporary file, which is renamed to `path` when it is complete.
    """
    if is_current(path):
        return
    with _locked(path.with_name(f".{path.name}.lock")):
        if is_current(path):
            return
        for leftover in path.parent.glob(f".{path.name}.*.part"):
            leftover.unlink(missing_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock; without effect where the file system does not support locks."""
    with lock.open("wb") as file:
        deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOCK_POLL_SECONDS)
            except OSError:
                break
        else:
            raise DataError(
                f"timed out waiting for {lock}, held by another process: end it and try again"
            )
        yield
