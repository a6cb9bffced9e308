"""SVHN, format 2: 32x32 color images, each centered on one digit, in MATLAB files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
from numpy.typing import NDArray

from paceline.data import manifest
from paceline.data.files import FileDataset, Source
from paceline.data.manifest import CorruptFileError, check_max_size
from paceline.data.matfile import MatVariable, read_variables
from paceline.data.storage import Chunk

_SHAPE = (3, 32, 32)
_IMAGE_BYTES = 3 * 32 * 32
_CHUNK_SAMPLES = 1024
# Labels may be stored as doubles, and incompressible data grows slightly.
_SAMPLE_LIMIT_BYTES = _IMAGE_BYTES + 8 + 32
_SLACK_BYTES = 1 << 16


def read_files(sources: Sequence[Source], wanted: int) -> Iterator[Chunk]:
    """Read samples from the files in order; label 10, which stands for the digit 0, becomes 0."""
    for source in sources:
        if wanted > 0:
            samples = min(wanted, source.samples)
            check_max_size(source.path, source.samples * _SAMPLE_LIMIT_BYTES + _SLACK_BYTES)
            # The file stores labels after images, but both are needed together.
            labels = _read_labels(source)
            yield from _read_images(source, labels[:samples])
            wanted -= samples


def _read_labels(source: Source) -> NDArray[np.uint8]:
    with _variable(source, "y", (source.samples, 1)) as variable:
        labels = np.concatenate(list(variable.numbers(source.samples)))
    if not np.isin(labels, np.arange(1, 11)).all():
        raise CorruptFileError(source.path, "has a label outside 1 to 10")
    return labels.astype(np.uint8) % 10


def _read_images(source: Source, labels: NDArray[np.uint8]) -> Iterator[Chunk]:
    done = 0
    with _variable(source, "X", (32, 32, 3, source.samples)) as variable:
        if variable.dtype is not np.uint8:
            raise CorruptFileError(source.path, "has images that are not uint8")
        for numbers in variable.numbers(_CHUNK_SAMPLES * _IMAGE_BYTES, len(labels) * _IMAGE_BYTES):
            # The file is column-major: in row-major order it holds the images one after another,
            # each as (channel, column, row).
            images = numbers.view(np.uint8).reshape(-1, *_SHAPE).transpose(0, 1, 3, 2)
            yield images, labels[done : done + len(images)]
            done += len(images)


@contextmanager
def _variable(source: Source, name: str, shape: tuple[int, ...]) -> Iterator[MatVariable]:
    with closing(read_variables(source.path)) as variables:
        for variable in variables:
            if variable.name == name:
                if variable.shape != shape:
                    raise CorruptFileError(
                        source.path, f"has {name} of shape {variable.shape}, expected {shape}"
                    )
                yield variable
                return
    raise CorruptFileError(source.path, f"has no variable {name}")


SVHN = FileDataset(manifest.SVHN, read_files)
SVHN_EXTRA = FileDataset(manifest.SVHN_EXTRA, read_files)
