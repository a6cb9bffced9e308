"""Image augmentation (flip, crop, cutout) of whole batches of uint8 images.

The random parameters depend only on (seed, epoch) and on the position of a sample in the epoch, so
a sample is augmented the same way for any number of workers. The parameters of one transform do not
depend on which other transforms are enabled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.sampling import derive_seed

CROP_PAD = 4
CUTOUT_SIDE = 8

_PURPOSE = 0x6175676D
"""Separates these random draws from others that use the same seed and epoch."""
_RANGE = 1 << 62
_MAX_CROP_BUFFERS = 2
"""One for full batches and one for the smaller last batch of an epoch."""

Integers = NDArray[np.int64]
"""One per sample. For arrays this small, numpy is faster than torch."""


@dataclass(frozen=True, slots=True)
class AugmentParams:
    """Parameters of all transforms, one entry per sample."""

    top: Integers
    left: Integers
    """Offset of the crop in the padded image."""
    flipped: Integers
    """1 if the image is flipped horizontally, else 0."""
    cut_row: Integers
    cut_column: Integers

    def part(self, samples: slice) -> AugmentParams:
        """Return the parameters of the given samples."""
        return AugmentParams(
            self.top[samples],
            self.left[samples],
            self.flipped[samples],
            self.cut_row[samples],
            self.cut_column[samples],
        )


def draw_augment_params(
    seed: int, epoch: int, samples: int, height: int, width: int
) -> AugmentParams:
    """Draw the parameters of all samples of an epoch, by position in the epoch."""
    generator = torch.Generator().manual_seed(derive_seed(seed, _PURPOSE, epoch))
    drawn: Integers = torch.randint(_RANGE, (samples,), generator=generator).numpy()
    columns = []
    # The range is so much larger than the product of all bounds that the modulo bias is negligible.
    for below in (2 * CROP_PAD + 1, 2 * CROP_PAD + 1, 2, height, width):
        columns.append(drawn % below)
        drawn //= below
    return AugmentParams(*columns)


class Augmenter:
    """Gathers samples and applies the enabled transforms in the order "flip", "crop", "cutout".

    Results live in buffers that the augmenter reuses; they are valid until the next call.
    """

    def __init__(
        self, kinds: Sequence[str], fill: Sequence[int] = (0,), device: torch.device | str = "cpu"
    ) -> None:
        self.kinds = frozenset(kinds)
        self.device = torch.device(device)
        self.fill = torch.tensor(fill, dtype=torch.uint8, device=device).view(1, -1, 1, 1)
        """Value of cut-out pixels, one per channel or one for all channels."""
        self._crop_buffers: dict[tuple[int, ...], _CropBuffer] = {}

    def gather(self, source: Tensor, rows: Tensor, params: AugmentParams) -> Tensor:
        """Return the augmented rows of `source` on the augmenter's device."""
        samples = len(rows)
        buffer = self._crop_buffer((samples, *source.shape[1:]))
        # Samples to flip are gathered after the others, so that flipping takes one slice.
        # `position` maps each sample to its gathered index; the next copy restores the order.
        position, unflipped = buffer.indices, samples
        if "flip" in self.kinds:
            flipped_last = params.flipped.argsort(kind="stable")
            position = np.empty_like(flipped_last)
            position[flipped_last] = buffer.indices
            unflipped -= int(np.count_nonzero(params.flipped))
            rows = rows.index_select(0, torch.from_numpy(flipped_last).to(rows.device))
        images = source.index_select(0, rows).to(self.device)
        if "crop" in self.kinds:
            images = buffer.crop(images, unflipped, position, params.top, params.left)
        elif "flip" in self.kinds:
            images[unflipped:] = images[unflipped:].flip(3)
            images = images.index_select(0, torch.from_numpy(position).to(self.device))
        if "cutout" in self.kinds:
            cut_out(images, params.cut_row, params.cut_column, self.fill)
        return images

    def _crop_buffer(self, shape: tuple[int, ...]) -> _CropBuffer:
        buffer = self._crop_buffers.get(shape)
        if buffer is None:
            if len(self._crop_buffers) == _MAX_CROP_BUFFERS:
                self._crop_buffers.clear()
            buffer = self._crop_buffers[shape] = _CropBuffer(shape, self.device)
        return buffer


class _CropBuffer:
    """Memory, and views of it, for cropping batches of one shape."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        samples, channels, height, width = shape
        padded_shape = (channels, height + 2 * CROP_PAD, width + 2 * CROP_PAD)
        self.shape = shape
        self.indices: Integers = np.arange(samples)
        # One more image than the batch, because a window may extend past the last image.
        padded = torch.zeros(samples + 1, *padded_shape, dtype=torch.uint8, device=device)
        self._size, self._row = padded.stride(0), padded.stride(2)
        self._inside = padded[:samples, :, CROP_PAD:-CROP_PAD, CROP_PAD:-CROP_PAD]
        self._all_windows = padded.as_strided((samples * self._size + 1, self._size), (1, 1))
        self._windows = padded.new_zeros(samples, self._size)
        self._cropped = self._windows.view(samples, *padded_shape)[:, :, :height, :width]

    def crop(
        self, images: Tensor, unflipped: int, position: Integers, top: Integers, left: Integers
    ) -> Tensor:
        """Return windows of the zero-padded images; images from index `unflipped` on are flipped.

        The bytes of an image from (top, left) on are contiguous, so each window is a single copy
        with rows as long as the padded ones. This is much cheaper than indexing pixels.
        """
        self._inside[:unflipped].copy_(images[:unflipped])
        if unflipped < len(images):
            self._inside[unflipped:].copy_(images[unflipped:].flip(3))
        begin = torch.from_numpy(position * self._size + top * self._row + left)
        torch.index_select(self._all_windows, 0, begin.to(images.device), out=self._windows)
        return self._cropped


def cut_out(images: Tensor, row: Integers, column: Integers, fill: Tensor) -> None:
    """Fill in place the part of a square around (row, column) that lies inside the image."""
    height, width = images.shape[2:]
    in_rows = _cutout_mask(row, height).reshape(-1, 1, height, 1)
    in_columns = _cutout_mask(column, width).reshape(-1, 1, 1, width)
    # All bits are set inside and clear outside: bitwise operations are faster than torch.where.
    inside = torch.from_numpy(in_rows & in_columns).to(images.device)
    images.bitwise_and_(inside.bitwise_not()).bitwise_or_(fill & inside)


def _cutout_mask(center: Integers, length: int) -> NDArray[np.uint8]:
    offset = np.arange(length) - (center[:, None] - CUTOUT_SIDE // 2)
    return np.where((offset >= 0) & (offset < CUTOUT_SIDE), np.uint8(255), np.uint8(0))
