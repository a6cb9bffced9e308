"""Normalization and augmentation (flip, crop, shift, cutout) of whole batches of uint8 images.

The random parameters of augmentation depend only on (seed, epoch) and on the position of a sample
in the epoch, so a sample is augmented the same way for any number of workers. The parameters of one
augmentation do not depend on which others are enabled. An alternate flip depends on the sample
instead of its position: it is random in the first epoch and the opposite of the previous one after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from paceline.data.sampling import derive_seed

CROP_PAD = 4
SHIFT_PAD = 2
CUTOUT_SIDE = 8

_PURPOSE = 0x6175676D
"""Separates these random draws from others that use the same seed and epoch."""
_FLIP_PURPOSE = 0x666C6970
_RANGE = 1 << 62
_MAX_CROP_BUFFERS = 2
"""One for full batches and one for the smaller last batch of an epoch."""

_IMAGE_EPSILON = 16.0
"""Added to the variance of an image's pixel values: does not amplify the noise of a flat image."""

Integers = NDArray[np.int64]
"""One per sample. For arrays this small, numpy is faster than torch."""


@dataclass(frozen=True, slots=True)
class ImageTransform:
    """Inputs are uint8 images (channels, height, width), to be normalized by channel."""

    mean: tuple[float, ...] = ()
    """Per channel, of images scaled to [0, 1]; a single value applies to all channels."""
    std: tuple[float, ...] = ()
    """Images without statistics are only scaled to [0, 1]."""
    per_image: bool = False
    """Normalize each channel of an image by its own mean and standard deviation instead."""

    @classmethod
    def from_images(cls, images: Tensor) -> ImageTransform:
        """Normalize by the statistics of these images."""
        values = torch.arange(256, dtype=torch.float64) / 255
        means, stds = [], []
        for channel in range(images.shape[1]):
            counts = torch.bincount(images[:, channel].flatten(), minlength=256).to(torch.float64)
            fractions = counts / counts.sum()
            mean = float((fractions * values).sum())
            std = float((fractions * (values - mean) ** 2).sum() ** 0.5)
            means.append(mean)
            # A constant channel carries no information, so any nonzero divisor works.
            stds.append(std or 1.0)
        return cls(tuple(means), tuple(stds))

    @property
    def mean_pixel(self) -> tuple[int, ...]:
        """Value that normalization maps closest to zero, one per channel or one for all."""
        return tuple(round(255 * value) for value in self.mean) or (0,)


class Normalizer:
    """Converts uint8 to floats as (x / 255 - mean) / std per channel, in one fused multiply-add.

    With `per_image`, mean and standard deviation are those of each image instead of the dataset.
    """

    def __init__(
        self,
        transform: ImageTransform,
        sample_shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._sample_shape = tuple(sample_shape)
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._per_image = transform.per_image
        mean64 = torch.tensor(transform.mean or (0.0,), dtype=torch.float64)
        std64 = torch.tensor(transform.std or (1.0,), dtype=torch.float64)
        self._scale = self._expand(1 / (255 * std64))
        self._shift = self._expand(-mean64 / std64)

    def _expand(self, channels: Tensor) -> Tensor:
        """Expand to one value per element of a sample; broadcasting over pixels is slower."""
        per_channel = channels.view(-1, *(1 for _ in self._sample_shape[1:]))
        full = per_channel.expand(self._sample_shape).unsqueeze(0).to(self._device, torch.float32)
        return full.contiguous(memory_format=self._layout)

    def __call__(self, images: Tensor) -> Tensor:
        if self._per_image:
            pixels = images.to(self._device).to(torch.float32)
            values = F.layer_norm(pixels, self._sample_shape[1:], eps=_IMAGE_EPSILON)
            return values.to(self._dtype, memory_format=self._layout)
        # The conversion creates a new tensor, so the arithmetic can be done in place.
        values = images.to(self._device).to(torch.float32, memory_format=self._layout)
        torch.addcmul(self._shift, values, self._scale, out=values)
        return values.to(self._dtype)


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
    down: Integers
    right: Integers
    """Offset of the shifted image in the padded one."""

    def part(self, samples: slice) -> AugmentParams:
        """Return the parameters of the given samples."""
        return AugmentParams(
            self.top[samples],
            self.left[samples],
            self.flipped[samples],
            self.cut_row[samples],
            self.cut_column[samples],
            self.down[samples],
            self.right[samples],
        )


def draw_augment_params(
    seed: int, epoch: int, samples: int, height: int, width: int
) -> AugmentParams:
    """Draw the parameters of all samples of an epoch, by position in the epoch."""
    generator = torch.Generator().manual_seed(derive_seed(seed, _PURPOSE, epoch))
    drawn: Integers = torch.randint(_RANGE, (samples,), generator=generator).numpy()
    columns = []
    # The range is so much larger than the product of all bounds that the modulo bias is negligible.
    crops, shifts = 2 * CROP_PAD + 1, 2 * SHIFT_PAD + 1
    for below in (crops, crops, 2, height, width, shifts, shifts):
        columns.append(drawn % below)
        drawn //= below
    return AugmentParams(*columns)


def with_alternate_flips(
    params: AugmentParams, seed: int, epoch: int, rows: Integers
) -> AugmentParams:
    """Return the parameters of an epoch with flips by sample; `rows` are its samples in order.

    In every two epochs, a sample is seen once in each orientation.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, _FLIP_PURPOSE))
    first: Integers = torch.randint(2, (len(rows),), generator=generator).numpy()
    return replace(params, flipped=first[rows] + epoch & 1)


class Augmenter:
    """Gathers samples and applies the enabled transforms: flip, then crop or shift, then cutout.

    A crop pads with zeros, a shift repeats the pixels at the edges.
    Results live in buffers that the augmenter reuses; they are valid until the next call.
    """

    def __init__(
        self, kinds: Sequence[str], fill: Sequence[int] = (0,), device: torch.device | str = "cpu"
    ) -> None:
        self.kinds = frozenset(kinds)
        self.flips = not self.kinds.isdisjoint(("flip", "alternate_flip"))
        self.device = torch.device(device)
        self.fill = torch.tensor(fill, dtype=torch.uint8, device=device).view(1, -1, 1, 1)
        """Value of cut-out pixels, one per channel or one for all channels."""
        self._pad = SHIFT_PAD if "shift" in self.kinds else CROP_PAD
        self._crop_buffers: dict[tuple[int, ...], _CropBuffer] = {}

    def gather(self, source: Tensor, rows: Tensor, params: AugmentParams) -> Tensor:
        """Return the augmented rows of `source` on the augmenter's device."""
        samples = len(rows)
        buffer = self._crop_buffer((samples, *source.shape[1:]))
        # Samples to flip are gathered after the others, so that flipping takes one slice.
        # `position` maps each sample to its gathered index; the next copy restores the order.
        position, unflipped = buffer.indices, samples
        if self.flips:
            flipped_last = params.flipped.argsort(kind="stable")
            position = np.empty_like(flipped_last)
            position[flipped_last] = buffer.indices
            unflipped -= int(np.count_nonzero(params.flipped))
            rows = rows.index_select(0, torch.from_numpy(flipped_last).to(rows.device))
        images = source.index_select(0, rows).to(self.device)
        if "crop" in self.kinds:
            images = buffer.crop(images, unflipped, position, params.top, params.left)
        elif "shift" in self.kinds:
            images = buffer.crop(images, unflipped, position, params.down, params.right)
        elif self.flips:
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
            buffer = self._crop_buffers[shape] = _CropBuffer(
                shape, self._pad, self.device, repeats_edges="shift" in self.kinds
            )
        return buffer


class _CropBuffer:
    """Memory, and views of it, for cropping batches of one shape."""

    def __init__(
        self, shape: tuple[int, ...], pad: int, device: torch.device, *, repeats_edges: bool
    ) -> None:
        samples, channels, height, width = shape
        padded_shape = (channels, height + 2 * pad, width + 2 * pad)
        self.shape = shape
        self.indices: Integers = np.arange(samples)
        # One more image than the batch, because a window may extend past the last image.
        padded = torch.zeros(samples + 1, *padded_shape, dtype=torch.uint8, device=device)
        self._size, self._row = padded.stride(0), padded.stride(2)
        self._inside = padded[:samples, :, pad:-pad, pad:-pad]
        self._edges: list[tuple[Tensor, Tensor]] = []
        if repeats_edges:
            columns, rows = self._inside, padded[:samples]
            beside = padded[:samples, :, pad:-pad]
            # Columns first: the rows above and below then have the pixels of the corners.
            self._edges = [
                (beside[..., :pad], columns[..., :1]),
                (beside[..., -pad:], columns[..., -1:]),
                (rows[:, :, :pad], rows[:, :, pad : pad + 1]),
                (rows[:, :, -pad:], rows[:, :, -pad - 1 : -pad]),
            ]
        self._all_windows = padded.as_strided((samples * self._size + 1, self._size), (1, 1))
        self._windows = padded.new_zeros(samples, self._size)
        self._cropped = self._windows.view(samples, *padded_shape)[:, :, :height, :width]

    def crop(
        self, images: Tensor, unflipped: int, position: Integers, top: Integers, left: Integers
    ) -> Tensor:
        """Return windows of the padded images; images from index `unflipped` on are flipped.

        The bytes of an image from (top, left) on are contiguous, so each window is a single copy
        with rows as long as the padded ones. This is much cheaper than indexing pixels.
        """
        self._inside[:unflipped].copy_(images[:unflipped])
        if unflipped < len(images):
            self._inside[unflipped:].copy_(images[unflipped:].flip(3))
        for margin, edge in self._edges:
            margin.copy_(edge.expand_as(margin))
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
