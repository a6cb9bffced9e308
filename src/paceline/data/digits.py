"""`digits`: street-number-like images, any number of them, drawn once and then kept on disk.

Samples are drawn in chunks, each a function of (seed, split, chunk): a smaller set is a prefix of a
larger one. The set's seed is its own and not the run's, so that runs of different seeds train on
the same images.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from paceline.data.catalogue import data_folder
from paceline.data.dataset import DataRequest, Dataset, Split
from paceline.data.drawing import DRAWING_VERSION, SIDE, draw_chunk
from paceline.data.order import mix
from paceline.data.storage import Chunk, mapped_split, resident_split
from paceline.errors import DataError

TRAIN_SAMPLES = 60_000
TEST_SAMPLES = 10_000
CLASSES = 10
CHUNK_SAMPLES = 250
SHAPE = (3, SIDE, SIDE)
MEAN = (0.359, 0.359, 0.359)
STD = (0.203, 0.203, 0.203)

_SPLITS = {"train": 1, "test": 2}
_WORTH_KEEPING_SAMPLES = 2_000
"""Fewer are drawn in less than a second; kept, they would litter the folder with all sizes."""

_log = logging.getLogger("paceline")


def load_digits(request: DataRequest) -> Dataset:
    wanted = {
        "train": TRAIN_SAMPLES if request.train_samples is None else request.train_samples,
        "test": TEST_SAMPLES if request.test_samples is None else request.test_samples,
    }
    train, test = (
        _load(split, samples, request.seed, request) for split, samples in wanted.items()
    )
    return Dataset("digits", train, test, CLASSES, MEAN, STD)


def _load(split: str, samples: int, seed: int, request: DataRequest) -> Split:
    fits = samples * SIDE * SIDE * 3 <= request.resident_limit_bytes
    if fits and samples <= _WORTH_KEEPING_SAMPLES:
        return resident_split(draw(split, samples, seed), samples, SHAPE)
    try:
        kept = _kept(split, samples, seed, data_folder(request.folder) / "digits")
    except DataError:
        # Keeping the set only saves time, unless it is too large to be held in memory.
        if not fits:
            raise
        return resident_split(draw(split, samples, seed), samples, SHAPE)
    return Split(kept.inputs.clone(), kept.labels) if fits else kept


def _kept(split: str, samples: int, seed: int, folder: Path) -> Split:
    """The set as mapped from its file, which is made first unless it is there and sound."""
    cache = folder / f"v{DRAWING_VERSION}-seed{seed}-{split}-{samples}.decoded"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = _map(cache, split, samples, seed)
        if not _is_sound(kept, split, seed):
            _log.warning("%s is damaged: drawing it again", cache)
            cache.unlink(missing_ok=True)
            kept = _map(cache, split, samples, seed)
    except OSError as error:
        raise DataError(
            f"cannot write to {folder}, where drawn digits are kept: {error.strerror}; "
            "choose another --data-dir"
        ) from None
    return kept


def _map(cache: Path, split: str, samples: int, seed: int) -> Split:
    return mapped_split(cache, (), lambda: draw(split, samples, seed), samples, SHAPE)


def _is_sound(kept: Split, split: str, seed: int) -> bool:
    """Whether the first chunk is what would be drawn now, and all labels are digits."""
    images, labels = next(draw(split, min(len(kept), CHUNK_SAMPLES), seed))
    return (
        np.array_equal(kept.inputs[: len(images)].numpy(), images)
        and np.array_equal(kept.labels[: len(labels)].numpy(), labels)
        and int(kept.labels.max()) < CLASSES
    )


def draw(split: str, samples: int, seed: int) -> Iterator[Chunk]:
    """The first `samples` images and labels of a split, chunk by chunk."""
    if samples > _WORTH_KEEPING_SAMPLES:
        _log.info("drawing %s digits (%s) ...", f"{samples:,}", split)
    for begin in range(0, samples, CHUNK_SAMPLES):
        generator = torch.Generator().manual_seed(mix(seed, _SPLITS[split], begin // CHUNK_SAMPLES))
        images, labels = draw_chunk(CHUNK_SAMPLES, generator)
        left = samples - begin
        yield images[:left].numpy(), labels[:left].to(torch.uint8).numpy()
