"""Writers of small files in the official formats, independent of the readers under test."""

from __future__ import annotations

import dataclasses
import gzip
import pickle
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.cifar10 import CIFAR10
from paceline.data.files import FileDataset
from paceline.data.manifest import ManifestFile
from paceline.data.mnist import MNIST
from paceline.data.svhn import SVHN, SVHN_EXTRA

Bytes = NDArray[np.uint8]

TRAIN, TEST = 7, 3
"""Samples per file of the small datasets."""


def random_bytes(*shape: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def random_labels(count: int, seed: int = 0) -> list[int]:
    return [int(label) for label in np.random.default_rng(seed).integers(0, 10, count)]


def shrunk(fileset: FileDataset) -> FileDataset:
    """Return the same dataset with a few samples per file."""
    official = fileset.official

    def files(some: Sequence[ManifestFile], samples: int) -> tuple[ManifestFile, ...]:
        return tuple(
            dataclasses.replace(file, samples=samples if file.samples else 0) for file in some
        )

    train = files(official.train, TRAIN)
    batches = 1 if fileset.read is MNIST.read else sum(file.samples > 0 for file in train)
    return dataclasses.replace(
        fileset,
        official=dataclasses.replace(
            official,
            train=train,
            test=files(official.test, TEST),
            train_samples=batches * TRAIN,
            test_samples=TEST,
        ),
    )


SMALL_MNIST, SMALL_CIFAR10 = shrunk(MNIST), shrunk(CIFAR10)
SMALL_SVHN, SMALL_SVHN_EXTRA = shrunk(SVHN), shrunk(SVHN_EXTRA)


def idx_bytes(values: Bytes) -> bytes:
    magic = 0x0800 + values.ndim
    return struct.pack(f">{1 + values.ndim}I", magic, *values.shape) + values.tobytes()


def write_mnist(folder: Path) -> tuple[Bytes, Bytes]:
    """Write small train and test files; return the training images and labels."""
    (folder / "mnist").mkdir(parents=True)
    for prefix, samples in (("t10k", TEST), ("train", TRAIN)):
        images = random_bytes(samples, 28, 28, seed=samples)
        labels = np.array(random_labels(samples), np.uint8)
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / "mnist" / f"{prefix}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(idx_bytes(values), mtime=0))
    return images, labels


def python2_batch(data: Bytes, labels: Sequence[int]) -> bytes:
    """Return a batch as pickled by Python 2 (the official files): protocol 2, byte strings."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def small(value: int) -> bytes:
        return b"M" + struct.pack("<H", value)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85"
        + text(b"b") + b"\x87Rq\x07(K\x01" + b"".join(map(small, data.shape)) + b"\x86"
        + b"cnumpy\ndtype\nq\x08" + text(b"u1") + b"K\x00K\x01\x87Rq\x09(K\x03" + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<i", data.size) + data.tobytes() + b"tb"
    )  # fmt: skip
    return (
        b"\x80\x02}q\x01("
        + text(b"batch_label") + b"q\x02" + text(b"training batch 1 of 5")
        + text(b"labels") + b"q\x03]q\x04(" + b"".join(b"K" + bytes([n]) for n in labels) + b"e"
        + text(b"data") + array
        + text(b"filenames") + b"]q\x0a(" + b"".join(text(b"a.png") for _ in labels) + b"eu."
    )  # fmt: skip


Pickler = Callable[[Bytes, Sequence[int]], bytes]


def python3_batch(protocol: int) -> Pickler:
    """Return a writer of batches pickled by Python 3."""
    return lambda data, labels: pickle.dumps(
        {"data": data, "labels": list(labels)}, protocol=protocol
    )


CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def write_cifar10(folder: Path, batch: Pickler = python2_batch) -> tuple[Bytes, list[int]]:
    """Write small batches; return the training images as rows, and the labels."""
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    rows, all_labels = [], []
    for number in range(1, 6):
        data, labels = random_bytes(TRAIN, 3072, seed=number), random_labels(TRAIN, number)
        (batches / f"data_batch_{number}").write_bytes(batch(data, labels))
        rows.append(data)
        all_labels += labels
    (batches / "test_batch").write_bytes(batch(random_bytes(TEST, 3072), random_labels(TEST)))
    meta = {"num_cases_per_batch": 10000, "label_names": CLASSES, "num_vis": 3072}
    (batches / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return np.concatenate(rows), all_labels


def _element(kind: int, data: bytes) -> bytes:
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def mat_variable(name: str, values: NDArray[np.generic], *, deflated: bool) -> bytes:
    """Return a variable of a MATLAB 5 file; supports doubles and bytes."""
    array_class, number_type = (9, 2) if values.dtype == np.uint8 else (6, 9)
    inside = (
        _element(6, struct.pack("<II", array_class, 0))
        + _element(5, struct.pack(f"<{values.ndim}i", *values.shape))
        + _element(1, name.encode())
        + _element(number_type, values.tobytes(order="F"))
    )
    whole = _element(14, inside)
    if not deflated:
        return whole
    small = zlib.compress(whole)
    return struct.pack("<II", 15, len(small)) + small


MAT_HEADER = b"MATLAB 5.0 MAT-file".ljust(116) + bytes(8) + b"\x00\x01IM"


def mat_file(images: Bytes, digits: Sequence[int], *, deflated: bool = True) -> bytes:
    """Return an SVHN file of images (samples, channels, rows, columns) and their digits."""
    labels = np.array([[digit or 10] for digit in digits], np.uint8)
    return (
        MAT_HEADER
        + mat_variable("X", images.transpose(2, 3, 1, 0), deflated=deflated)
        + mat_variable("y", labels, deflated=deflated)
    )


def write_svhn(folder: Path, *, deflated: bool = True) -> dict[str, tuple[Bytes, list[int]]]:
    """Write small train, extra and test files; return the images and digits of each."""
    (folder / "svhn").mkdir(parents=True)
    splits = {}
    for seed, (split, samples) in enumerate((("train", TRAIN), ("extra", TRAIN), ("test", TEST))):
        images = random_bytes(samples, 3, 32, 32, seed=seed)
        digits = [(seed + position) % 10 for position in range(samples)]
        path = folder / "svhn" / f"{split}_32x32.mat"
        path.write_bytes(mat_file(images, digits, deflated=deflated))
        splits[split] = images, digits
    return splits


BOMB_BYTES = 32 << 20


@contextmanager
def peak_below(limit_bytes: int) -> Iterator[None]:
    """Assert that a block never has more than `limit_bytes` allocated at once."""
    tracemalloc.start()
    try:
        yield
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < limit_bytes


def cut_positions(length: int) -> list[int]:
    """Return positions to truncate a file at: near its ends, around headers, and in between."""
    return sorted({0, 1, 7, 8, 15, 40, 127, 128, 140, 200, length // 3, length // 2, length - 9,
                   length - 4, length - 1} & set(range(length)))  # fmt: skip
