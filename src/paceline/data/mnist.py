"""MNIST and Fashion-MNIST: grey images of 28 x 28 in gzipped IDX files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.data import catalogue
from paceline.data.fileset import FileSet, Source
from paceline.data.idx import read_idx
from paceline.data.storage import Chunk

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


MNIST = FileSet(catalogue.MNIST, read_pair)
FASHION_MNIST = FileSet(catalogue.FASHION_MNIST, read_pair)
