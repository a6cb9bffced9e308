"""The gzipped IDX format of MNIST and Fashion-MNIST: big-endian numbers as a header, then bytes.

MNIST and Fashion-MNIST: grey images of 28 x 28 in gzipped IDX files."""

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
from paceline.data.manifest import CorruptFileError, refuse_larger
from paceline.data.storage import Chunk

LABELS_MAGIC = 0x0801
IMAGES_MAGIC = 0x0803
_KINDS = {LABELS_MAGIC: "labels", IMAGES_MAGIC: "images"}

CHUNK_SAMPLES = 4096
# What a compressed file may have beyond its contents: gzip's own framing, with room to spare.
_SLACK_BYTES = 1 << 16


def read_idx(
    path: Path, shape: tuple[int, ...], wanted: int | None = None
) -> Iterator[NDArray[np.uint8]]:
    """The first `wanted` (default: all) entries of a file that must have exactly this shape.

    Never inflates more than the shape allows. A file that is read to its end must end there, with
    the right checksum.
    """
    entry_bytes = int(np.prod(shape[1:]))
    refuse_larger(path, shape[0] * entry_bytes * 101 // 100 + _SLACK_BYTES)
    remaining = shape[0] if wanted is None else min(wanted, shape[0])
    to_the_end = remaining == shape[0]
    with _damage_named(path), gzip.open(path, "rb") as stream:
        _check_header(path, stream.read(4 + 4 * len(shape)), shape)
        while remaining:
            entries = min(remaining, CHUNK_SAMPLES)
            data = stream.read(entries * entry_bytes)
            if len(data) != entries * entry_bytes:
                raise CorruptFileError(path, "is cut short")
            remaining -= entries
            yield np.frombuffer(data, np.uint8).reshape(entries, *shape[1:])
        if to_the_end and stream.read(1):
            raise CorruptFileError(path, f"holds more than its {shape[0]} entries")


def _check_header(path: Path, header: bytes, shape: tuple[int, ...]) -> None:
    wanted_magic = IMAGES_MAGIC if len(shape) == 3 else LABELS_MAGIC
    if len(header) < 8:
        raise CorruptFileError(path, "is cut short")
    magic, *found = struct.unpack(f">{len(header) // 4}I", header[: len(header) // 4 * 4])
    if magic != wanted_magic:
        kind = _KINDS.get(magic)
        what = f"holds {kind}" if kind else "is no IDX file"
        raise CorruptFileError(path, f"{what} where {_KINDS[wanted_magic]} should be")
    if tuple(found) != shape:
        raise CorruptFileError(path, f"has the shape {tuple(found)} where {shape} should be")


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """What the gzip module raises, as damage of this file."""
    try:
        yield
    except EOFError:
        raise CorruptFileError(path, "is cut short") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise CorruptFileError(path, f"is not a sound gzip file ({error})") from None


_HEIGHT = _WIDTH = 28


def read_pair(sources: Sequence[Source], wanted: int) -> Iterator[Chunk]:
    """Samples from a file of images and a file of labels."""
    images, labels = sources
    for some_images, some_labels in zip(
        read_idx(images.path, (images.samples, _HEIGHT, _WIDTH), wanted),
        read_idx(labels.path, (labels.samples,), wanted),
        strict=True,
    ):
        yield some_images[:, None], some_labels


MNIST = FileDataset(manifest.MNIST, read_pair)
FASHION_MNIST = FileDataset(manifest.FASHION_MNIST, read_pair)
