"""MNIST and Fashion-MNIST: 28x28 grayscale images in gzipped IDX files.

An IDX file has a header of big-endian integers (magic number and shape), then one byte per entry.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data import manifest
from paceline.data.files import FileDataset, Source
from paceline.data.manifest import CorruptFileError, check_max_size
from paceline.data.storage import Chunk

LABELS_MAGIC = 0x0801
IMAGES_MAGIC = 0x0803
_KINDS = {LABELS_MAGIC: "labels", IMAGES_MAGIC: "images"}

CHUNK_SAMPLES = 4096
_SLACK_BYTES = 1 << 16
"""Generous bound on the overhead of gzip framing."""
_HEIGHT = _WIDTH = 28


def read_idx(
    path: Path, shape: tuple[int, ...], wanted: int | None = None
) -> Iterator[NDArray[np.uint8]]:
    """Yield the first `wanted` (default: all) entries of a file that must have exactly this shape.

    Never decompresses more than the shape allows. A file that is read completely must have no
    trailing data and a correct checksum.
    """
    entry_bytes = int(np.prod(shape[1:]))
    check_max_size(path, shape[0] * entry_bytes * 101 // 100 + _SLACK_BYTES)
    remaining = shape[0] if wanted is None else min(wanted, shape[0])
    reads_all = remaining == shape[0]
    with _gzip_errors(path), gzip.open(path, "rb") as stream:
        _check_header(path, stream.read(4 + 4 * len(shape)), shape)
        while remaining:
            entries = min(remaining, CHUNK_SAMPLES)
            data = stream.read(entries * entry_bytes)
            if len(data) != entries * entry_bytes:
                raise CorruptFileError(path, "is truncated")
            remaining -= entries
            yield np.frombuffer(data, np.uint8).reshape(entries, *shape[1:])
        if reads_all and stream.read(1):
            raise CorruptFileError(path, f"contains more than {shape[0]} entries")


def _check_header(path: Path, header: bytes, shape: tuple[int, ...]) -> None:
    expected_magic = IMAGES_MAGIC if len(shape) == 3 else LABELS_MAGIC
    if len(header) < 8:
        raise CorruptFileError(path, "is truncated")
    magic, *found = struct.unpack(f">{len(header) // 4}I", header[: len(header) // 4 * 4])
    if magic != expected_magic:
        kind = _KINDS.get(magic)
        what = f"contains {kind}" if kind else "is not an IDX file"
        raise CorruptFileError(path, f"{what}, expected {_KINDS[expected_magic]}")
    if tuple(found) != shape:
        raise CorruptFileError(path, f"has shape {tuple(found)}, expected {shape}")


@contextmanager
def _gzip_errors(path: Path) -> Iterator[None]:
    """Turn exceptions of the gzip module into CorruptFileError."""
    try:
        yield
    except EOFError:
        raise CorruptFileError(path, "is truncated") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise CorruptFileError(path, f"is not a valid gzip file ({error})") from None


def read_pair(sources: Sequence[Source], wanted: int) -> Iterator[Chunk]:
    """Read samples from a file of images and a file of labels."""
    images, labels = sources
    for some_images, some_labels in zip(
        read_idx(images.path, (images.samples, _HEIGHT, _WIDTH), wanted),
        read_idx(labels.path, (labels.samples,), wanted),
        strict=True,
    ):
        yield some_images[:, None], some_labels


MNIST = FileDataset(manifest.MNIST, read_pair)
FASHION_MNIST = FileDataset(manifest.FASHION_MNIST, read_pair)
