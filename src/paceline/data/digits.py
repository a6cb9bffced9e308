"""`digits` and `plain_digits`: any number of images, drawn once and then kept on disk.

Samples are drawn in chunks, each a function of (seed, split, chunk): a smaller set is a prefix of a
larger one. The set's seed is its own and not the run's, so that runs of different seeds train on
the same images.
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
from paceline.data.manifest import data_folder
from paceline.data.sampling import derive_seed
from paceline.data.storage import Chunk, mapped_split, resident_split
from paceline.errors import DataError

TRAIN_SAMPLES = 60_000
TEST_SAMPLES = 10_000
CLASSES = 10
CHUNK_SAMPLES = 250

_SPLITS = {"train": 1, "test": 2}
_WORTH_KEEPING_SAMPLES = 2_000
"""Fewer are drawn in less than a second; kept, they would litter the folder with all sizes."""

_log = logging.getLogger("paceline")


@dataclass(frozen=True)
class SyntheticDigits:
    """A `Loader` of images that a function draws."""

    name: str
    draw_chunk: Callable[[int, Generator], tuple[Tensor, Tensor]]
    """(samples, generator) -> images as bytes, and their labels."""
    shape: tuple[int, int, int]
    """Channels, height, width."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, request: LoadRequest) -> Dataset:
        wanted = {
            "train": TRAIN_SAMPLES if request.train_samples is None else request.train_samples,
            "test": TEST_SAMPLES if request.test_samples is None else request.test_samples,
        }
        train, test = (self._load(split, samples, request) for split, samples in wanted.items())
        return Dataset(self.name, train, test, CLASSES, self.mean, self.std)

    @property
    def outline(self) -> DatasetInfo:
        return DatasetInfo(self.shape, CLASSES, TRAIN_SAMPLES, TEST_SAMPLES)

    def draw(self, split: str, samples: int, seed: int) -> Iterator[Chunk]:
        """The first `samples` images and labels of a split, chunk by chunk."""
        if samples > _WORTH_KEEPING_SAMPLES:
            _log.info("drawing %s digits (%s) ...", f"{samples:,}", split)
        for begin in range(0, samples, CHUNK_SAMPLES):
            chunk_seed = derive_seed(seed, _SPLITS[split], begin // CHUNK_SAMPLES)
            images, labels = self.draw_chunk(CHUNK_SAMPLES, Generator().manual_seed(chunk_seed))
            left = samples - begin
            yield images[:left].numpy(), labels[:left].numpy().astype(np.uint8)

    def _load(self, split: str, samples: int, request: LoadRequest) -> Split:
        fits = samples * int(np.prod(self.shape)) <= request.resident_limit_bytes
        if fits and samples <= _WORTH_KEEPING_SAMPLES:
            return self._resident(split, samples, request.seed)
        try:
            kept = self._kept(split, samples, request.seed, data_folder(request.folder) / self.name)
        except DataError:
            # Keeping the set only saves time, unless it is too large to be held in memory.
            if not fits:
                raise
            return self._resident(split, samples, request.seed)
        return Split(kept.inputs.clone(), kept.labels) if fits else kept

    def _resident(self, split: str, samples: int, seed: int) -> Split:
        return resident_split(self.draw(split, samples, seed), samples, self.shape)

    def _kept(self, split: str, samples: int, seed: int, folder: Path) -> Split:
        """The set as mapped from its file, which is made first unless it is there and sound."""
        cache = folder / f"v{DRAWING_VERSION}-seed{seed}-{split}-{samples}.decoded"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kept = self._mapped(cache, split, samples, seed)
            if not self._is_sound(kept, split, seed):
                _log.warning("%s is damaged: drawing it again", cache)
                cache.unlink(missing_ok=True)
                kept = self._mapped(cache, split, samples, seed)
        except OSError as error:
            raise DataError(
                f"cannot write to {folder}, where drawn digits are kept: {error.strerror}; "
                "choose another --data-dir"
            ) from None
        return kept

    def _mapped(self, cache: Path, split: str, samples: int, seed: int) -> Split:
        return mapped_split(cache, (), lambda: self.draw(split, samples, seed), samples, self.shape)

    def _is_sound(self, kept: Split, split: str, seed: int) -> bool:
        """Whether the first chunk is what would be drawn now, and all labels are digits."""
        images, labels = next(self.draw(split, min(len(kept), CHUNK_SAMPLES), seed))
        return (
            np.array_equal(kept.inputs[: len(images)].numpy(), images)
            and np.array_equal(kept.labels[: len(labels)].numpy(), labels)
            and int(kept.labels.max()) < CLASSES
        )


DIGITS = SyntheticDigits("digits", draw_street_numbers, (3, 32, 32), (0.359,) * 3, (0.203,) * 3)
PLAIN_DIGITS = SyntheticDigits("plain_digits", draw_plain_digits, (1, 28, 28), (0.125,), (0.265,))
