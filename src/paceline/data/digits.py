"""Synthetic datasets `digits` and `plain_digits`: any number of images, cached on disk.

Samples are generated in chunks, each a function of (seed, split, chunk), so a smaller dataset is a
prefix of a larger one. The seed of the dataset is independent of the seed of the run: runs with
different seeds train on the same images.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Generator, Tensor

from paceline.data.dataset import Dataset, DatasetInfo, LoadRequest, Split
from paceline.data.digit_images import DRAWING_VERSION, draw_plain_digits, draw_street_numbers
from paceline.data.image_transforms import ImageTransform
from paceline.data.manifest import data_folder
from paceline.data.sampling import derive_seed
from paceline.data.storage import Chunk, mapped_split, resident_split
from paceline.errors import DataError

TRAIN_SAMPLES = 60_000
TEST_SAMPLES = 10_000
CLASSES = 10
CHUNK_SAMPLES = 250

_SPLITS = {"train": 1, "test": 2}
_MAX_UNCACHED_SAMPLES = 2_000
"""Up to this many are generated in under a second; caching them would only clutter the folder."""

_log = logging.getLogger("paceline")


@dataclass(frozen=True)
class SyntheticDigits:
    """A `Loader` for generated images."""

    name: str
    draw_chunk: Callable[[int, Generator], tuple[Tensor, Tensor]]
    """(samples, generator) -> uint8 images and labels."""
    shape: tuple[int, int, int]
    """(channels, height, width)."""
    transform: ImageTransform

    def __call__(self, request: LoadRequest) -> Dataset:
        sizes = {
            "train": TRAIN_SAMPLES if request.train_samples is None else request.train_samples,
            "test": TEST_SAMPLES if request.test_samples is None else request.test_samples,
        }
        train, test = (self._load(split, samples, request) for split, samples in sizes.items())
        return Dataset(self.name, train, test, CLASSES, self.transform)

    @property
    def outline(self) -> DatasetInfo:
        return DatasetInfo(self.shape, CLASSES, TRAIN_SAMPLES, TEST_SAMPLES)

    def draw(self, split: str, samples: int, seed: int) -> Iterator[Chunk]:
        """Generate the first `samples` images and labels of a split in chunks."""
        if samples > _MAX_UNCACHED_SAMPLES:
            _log.info("generating %s digits (%s) ...", f"{samples:,}", split)
        for begin in range(0, samples, CHUNK_SAMPLES):
            chunk_seed = derive_seed(seed, _SPLITS[split], begin // CHUNK_SAMPLES)
            images, labels = self.draw_chunk(CHUNK_SAMPLES, Generator().manual_seed(chunk_seed))
            left = samples - begin
            yield images[:left].numpy(), labels[:left].numpy().astype(np.uint8)

    def _load(self, split: str, samples: int, request: LoadRequest) -> Split:
        fits = samples * int(np.prod(self.shape)) <= request.resident_limit_bytes
        if fits and samples <= _MAX_UNCACHED_SAMPLES:
            return self._resident(split, samples, request.seed)
        try:
            folder = data_folder(request.folder) / self.name
            cached = self._cached(split, samples, request.seed, folder)
        except DataError:
            # The cache is optional unless the dataset does not fit in memory.
            if not fits:
                raise
            return self._resident(split, samples, request.seed)
        return Split(cached.inputs.clone(), cached.targets.clone()) if fits else cached

    def _resident(self, split: str, samples: int, seed: int) -> Split:
        return resident_split(self.draw(split, samples, seed), samples, self.shape)

    def _cached(self, split: str, samples: int, seed: int, folder: Path) -> Split:
        """Map a split from its cache file, which is written first if it is missing or corrupt."""
        cache = folder / f"v{DRAWING_VERSION}-seed{seed}-{split}-{samples}.decoded"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            cached = self._mapped(cache, split, samples, seed)
            if not self._is_valid(cached, split, seed):
                _log.warning("%s is corrupt: generating it again", cache)
                cache.unlink(missing_ok=True)
                cached = self._mapped(cache, split, samples, seed)
        except OSError as error:
            raise DataError(
                f"cannot write to {folder}, the cache of generated digits: {error.strerror}; "
                "use another --data-dir"
            ) from None
        return cached

    def _mapped(self, cache: Path, split: str, samples: int, seed: int) -> Split:
        return mapped_split(cache, (), lambda: self.draw(split, samples, seed), samples, self.shape)

    def _is_valid(self, cached: Split, split: str, seed: int) -> bool:
        """Return whether the first chunk matches a newly generated one and all labels are valid."""
        images, labels = next(self.draw(split, min(len(cached), CHUNK_SAMPLES), seed))
        return (
            np.array_equal(cached.inputs[: len(images)].numpy(), images)
            and np.array_equal(cached.targets[: len(labels)].numpy(), labels)
            and int(cached.targets.max()) < CLASSES
        )


DIGITS = SyntheticDigits(
    "digits", draw_street_numbers, (3, 32, 32), ImageTransform((0.359,) * 3, (0.203,) * 3)
)
PLAIN_DIGITS = SyntheticDigits(
    "plain_digits", draw_plain_digits, (1, 28, 28), ImageTransform((0.125,), (0.265,))
)
