"""CIFAR-10: 32x32 color images in the pickled batches of its Python version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from paceline.data import manifest
from paceline.data.files import FileDataset, Source
from paceline.data.manifest import CorruptFileError, check_max_size
from paceline.data.restricted_pickle import ByteArray, PickleRefusedError, read_plain_pickle
from paceline.data.storage import Chunk

CLASS_NAMES = (
    b"airplane", b"automobile", b"bird", b"cat", b"deer",
    b"dog", b"frog", b"horse", b"ship", b"truck",
)  # fmt: skip

_SHAPE = (3, 32, 32)
_IMAGE_BYTES = 3 * 32 * 32
# In addition to its image, a sample has a label and a file name.
_SAMPLE_LIMIT_BYTES = _IMAGE_BYTES + 256
_SLACK_BYTES = 1 << 16


def read_batches(sources: Sequence[Source], wanted: int) -> Iterator[Chunk]:
    """Read samples from batch files in order; the file without samples lists the class names."""
    for source in sources:
        if not source.samples:
            _check_class_names(source.path)
        elif wanted > 0:
            images, labels = _read_batch(source)
            yield images[:wanted], labels[:wanted]
            wanted -= len(labels)


def _read_batch(source: Source) -> Chunk:
    path = source.path
    batch = _read_dictionary(path, source.samples * _SAMPLE_LIMIT_BYTES + _SLACK_BYTES)
    data, labels = batch.get(b"data"), batch.get(b"labels")
    if not isinstance(data, ByteArray) or not isinstance(labels, list):
        raise CorruptFileError(path, "is not a batch of images: data or labels are missing")
    if data.values.shape != (source.samples, _IMAGE_BYTES):
        raise CorruptFileError(
            path,
            f"has images of shape {data.values.shape}, expected {(source.samples, _IMAGE_BYTES)}",
        )
    if len(labels) != source.samples:
        raise CorruptFileError(path, f"has {len(labels)} labels for {source.samples} images")
    if not all(type(label) is int and 0 <= label < len(CLASS_NAMES) for label in labels):
        raise CorruptFileError(path, f"has a label outside 0 to {len(CLASS_NAMES) - 1}")
    return data.values.reshape(-1, *_SHAPE), np.array(labels, np.uint8)


def _check_class_names(path: Path) -> None:
    names = _read_dictionary(path, _SLACK_BYTES).get(b"label_names")
    found = [_as_bytes(name) for name in names] if isinstance(names, list) else names
    if found != list(CLASS_NAMES):
        raise CorruptFileError(path, "does not list the ten class names of CIFAR-10 in order")


def _read_dictionary(path: Path, limit_bytes: int) -> Mapping[object, object]:
    check_max_size(path, limit_bytes)
    try:
        value = read_plain_pickle(path.read_bytes())
    except PickleRefusedError as error:
        raise CorruptFileError(path, str(error)) from None
    if not isinstance(value, dict):
        raise CorruptFileError(path, "is not a CIFAR-10 file: it does not contain a dictionary")
    return {_as_bytes(key): entry for key, entry in value.items()}


def _as_bytes(value: object) -> object:
    """Convert text to the bytes that Python 2 would have written."""
    return value.encode("utf-8", "replace") if isinstance(value, str) else value


CIFAR10 = FileDataset(manifest.CIFAR10, read_batches)
