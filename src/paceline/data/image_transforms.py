"""Random changes to images on their way out of a uint8 split, a few operations for many samples.

What is drawn depends on (seed, epoch) and on a sample's position in the epoch alone: a sample is
changed alike whatever the number of workers. A kind's draws do not depend on which other kinds are
asked for.
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
"""Keeps these draws apart from others made with the same seed and epoch."""
_RANGE = 1 << 62
_MOST_ROOMS = 2
"""Kept at a time: for an epoch's batches, and for its last one."""

Numbers = NDArray[np.int64]
"""One for each sample. Arithmetic on so few takes numpy less time than torch."""


@dataclass(frozen=True, slots=True)
class AugmentParams:
    """What is to be done to some samples."""

    top: Numbers
    left: Numbers
    """Where a crop begins in the padded image."""
    mirrored: Numbers
    """0 or 1."""
    cut_row: Numbers
    cut_column: Numbers

    def part(self, samples: slice) -> AugmentParams:
        return AugmentParams(
            self.top[samples],
            self.left[samples],
            self.mirrored[samples],
            self.cut_row[samples],
            self.cut_column[samples],
        )


def draw_changes(seed: int, epoch: int, samples: int, height: int, width: int) -> AugmentParams:
    """The changes to all samples of an epoch, by position."""
    generator = torch.Generator().manual_seed(derive_seed(seed, _PURPOSE, epoch))
    drawn: Numbers = torch.randint(_RANGE, (samples,), generator=generator).numpy()
    parts = []
    # The range is so much larger than the product of all parts that none is favoured noticeably.
    for below in (2 * CROP_PAD + 1, 2 * CROP_PAD + 1, 2, height, width):
        parts.append(drawn % below)
        drawn //= below
    return AugmentParams(*parts)


class Augmenter:
    """Gathers samples and changes them: "flip", "crop", "cutout", in this order, those asked for.

    Its results stand in memory that it keeps, and hold until the next call.
    """

    def __init__(
        self, kinds: Sequence[str], fill: Sequence[int] = (0,), device: torch.device | str = "cpu"
    ) -> None:
        self.kinds = frozenset(kinds)
        self.device = torch.device(device)
        self.fill = torch.tensor(fill, dtype=torch.uint8, device=device).view(1, -1, 1, 1)
        """What a cut-out square holds, for each channel; one value serves all."""
        self._rooms: dict[tuple[int, ...], _Room] = {}

    def gather(self, source: Tensor, rows: Tensor, changes: AugmentParams) -> Tensor:
        """The rows of `source`, changed, on the augmenter's device."""
        samples = len(rows)
        room = self._room((samples, *source.shape[1:]))
        # Samples to be mirrored are gathered behind the others, so that mirroring takes one slice;
        # `place` says where each sample then is, and the copy that moves images puts them back.
        place, upright = room.numbers, samples
        if "flip" in self.kinds:
            behind_others = changes.mirrored.argsort(kind="stable")
            place = np.empty_like(behind_others)
            place[behind_others] = room.numbers
            upright -= int(np.count_nonzero(changes.mirrored))
            rows = rows.index_select(0, torch.from_numpy(behind_others).to(rows.device))
        images = source.index_select(0, rows).to(self.device)
        if "crop" in self.kinds:
            images = room.crop(images, upright, place, changes.top, changes.left)
        elif "flip" in self.kinds:
            images[upright:] = images[upright:].flip(3)
            images = images.index_select(0, torch.from_numpy(place).to(self.device))
        if "cutout" in self.kinds:
            cut_out(images, changes.cut_row, changes.cut_column, self.fill)
        return images

    def _room(self, shape: tuple[int, ...]) -> _Room:
        room = self._rooms.get(shape)
        if room is None:
            if len(self._rooms) == _MOST_ROOMS:
                self._rooms.clear()
            room = self._rooms[shape] = _Room(shape, self.device)
        return room


class _Room:
    """Memory, and views of it, for cropping batches of one shape."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        samples, channels, height, width = shape
        padded_shape = (channels, height + 2 * CROP_PAD, width + 2 * CROP_PAD)
        self.shape = shape
        self.numbers: Numbers = np.arange(samples)
        # One image more than the batch, because a window may run on behind the last.
        padded = torch.zeros(samples + 1, *padded_shape, dtype=torch.uint8, device=device)
        self._size, self._row = padded.stride(0), padded.stride(2)
        self._inside = padded[:samples, :, CROP_PAD:-CROP_PAD, CROP_PAD:-CROP_PAD]
        self._from_everywhere = padded.as_strided((samples * self._size + 1, self._size), (1, 1))
        self._windows = padded.new_zeros(samples, self._size)
        self._cropped = self._windows.view(samples, *padded_shape)[:, :, :height, :width]

    def crop(
        self, images: Tensor, upright: int, place: Numbers, top: Numbers, left: Numbers
    ) -> Tensor:
        """Windows of the images padded with zeros, those from `upright` on mirrored.

        An image's bytes from (top, left) on are contiguous, so that each window is one copy, with
        rows as long as the padded ones: far cheaper than indexing pixels.
        """
        self._inside[:upright].copy_(images[:upright])
        if upright < len(images):
            self._inside[upright:].copy_(images[upright:].flip(3))
        begin = torch.from_numpy(place * self._size + top * self._row + left)
        torch.index_select(self._from_everywhere, 0, begin.to(images.device), out=self._windows)
        return self._cropped


def cut_out(images: Tensor, row: Numbers, column: Numbers, fill: Tensor) -> None:
    """Fill a square around (row, column) in place, as much of it as lies inside the image."""
    height, width = images.shape[2:]
    in_rows = _near(row, height).reshape(-1, 1, height, 1)
    in_columns = _near(column, width).reshape(-1, 1, 1, width)
    # Bytes of ones inside and zeros outside: operations on bits are faster than choices.
    inside = torch.from_numpy(in_rows & in_columns).to(images.device)
    images.bitwise_and_(inside.bitwise_not()).bitwise_or_(fill & inside)


def _near(centre: Numbers, length: int) -> NDArray[np.uint8]:
    offset = np.arange(length) - (centre[:, None] - CUTOUT_SIDE // 2)
    return np.where((offset >= 0) & (offset < CUTOUT_SIDE), np.uint8(255), np.uint8(0))
