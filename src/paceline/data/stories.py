"""Synthetic dataset `stories`: any amount of text from a seeded grammar, cached on disk.

The text is generated in chunks, each a function of (seed, split, chunk), so a smaller dataset is a
prefix of a larger one. The seed of the dataset is independent of the seed of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from paceline.config.run_config import DEFAULT_CONTEXT
from paceline.data.dataset import Dataset, DatasetInfo, LoadRequest, Split
from paceline.data.manifest import check_free_space, data_folder
from paceline.data.sampling import derive_seed
from paceline.data.storage import build_once
from paceline.data.story_grammar import GRAMMAR_VERSION, NUMBERS_PER_STORY, write_story
from paceline.data.text import BYTES, VOCABULARY, windows
from paceline.errors import DataError

TRAIN_SAMPLES = 40_000
TEST_SAMPLES = 4_000
CHUNK_STORIES = 1000

_SPLITS = {"train": 1, "test": 2}
_MAX_UNCACHED_BYTES = 1 << 20
"""Up to this size, text is generated in a fraction of a second; caching it would only clutter."""

_log = logging.getLogger("paceline")


def draw_text(split: str, size_bytes: int, seed: int = 0) -> Iterator[bytes]:
    """Generate the first `size_bytes` bytes of a split in chunks."""
    if size_bytes > _MAX_UNCACHED_BYTES:
        _log.info("generating %s bytes of stories (%s) ...", f"{size_bytes:,}", split)
    chunk = 0
    while size_bytes > 0:
        generator = torch.Generator().manual_seed(derive_seed(seed, _SPLITS[split], chunk))
        shape = (CHUNK_STORIES, NUMBERS_PER_STORY)
        numbers = torch.randint(2**31, shape, generator=generator).tolist()
        text = "".join(map(write_story, numbers)).encode()[:size_bytes]
        yield text
        size_bytes -= len(text)
        chunk += 1


class Stories:
    """The `Loader` of generated text."""

    name = "stories"

    def __call__(self, request: LoadRequest) -> Dataset:
        context = request.context or DEFAULT_CONTEXT
        sizes = {
            "train": TRAIN_SAMPLES if request.train_samples is None else request.train_samples,
            "test": TEST_SAMPLES if request.test_samples is None else request.test_samples,
        }
        train, test = (
            self._load(split, samples, context, request) for split, samples in sizes.items()
        )
        return Dataset(self.name, train, test, VOCABULARY, BYTES)

    @property
    def outline(self) -> DatasetInfo:
        return DatasetInfo(
            (DEFAULT_CONTEXT,), VOCABULARY, TRAIN_SAMPLES, TEST_SAMPLES, has_tokens=True
        )

    def _load(self, split: str, samples: int, context: int, request: LoadRequest) -> Split:
        # The target of the last token is one more.
        size_bytes = samples * context + 1
        fits = size_bytes <= request.resident_limit_bytes
        if fits and size_bytes <= _MAX_UNCACHED_BYTES:
            return windows(_resident(split, size_bytes, request.seed), context)
        try:
            folder = data_folder(request.folder) / self.name
            tokens = _cached(split, size_bytes, request.seed, folder)
        except DataError:
            # The cache is optional unless the dataset does not fit in memory.
            if not fits:
                raise
            return windows(_resident(split, size_bytes, request.seed), context)
        return windows(tokens.clone() if fits else tokens, context)


def _resident(split: str, size_bytes: int, seed: int) -> Tensor:
    text = bytearray().join(draw_text(split, size_bytes, seed))
    return torch.frombuffer(text, dtype=torch.uint8)


def _cached(split: str, size_bytes: int, seed: int, folder: Path) -> Tensor:
    """Map text from its cache file, which is written first if it is missing or corrupt."""
    cache = folder / f"v{GRAMMAR_VERSION}-seed{seed}-{split}-{size_bytes}.txt"

    def write(file: BinaryIO) -> None:
        file.writelines(draw_text(split, size_bytes, seed))

    def is_current(path: Path) -> bool:
        if not path.is_file() or path.stat().st_size != size_bytes:
            return False
        start = next(draw_text(split, min(size_bytes, _MAX_UNCACHED_BYTES), seed))
        with path.open("rb") as file:
            return file.read(len(start)) == start

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not is_current(cache):
            check_free_space(folder, size_bytes, "use fewer --train-samples or another --data-dir")
            build_once(cache, write, is_current)
        return torch.from_file(str(cache), shared=False, size=size_bytes, dtype=torch.uint8)
    except OSError as error:
        raise DataError(
            f"cannot write to {folder}, the cache of generated stories: {error.strerror}; "
            "use another --data-dir"
        ) from None


STORIES = Stories()
