"""Input pipeline of a dataset that lives on the GPU.

A batch is gathered and augmented by operations of fixed shape on the GPU, so that a CUDA graph can
contain them. What changes from batch to batch is in device memory: a table of the epoch (the row
and the augmentation of each sample) and the position of the batch in it.

Images are stored with the border that a crop or shift may reach into. Flip and crop are then one
indexing operation. The results equal those of `Augmenter` byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.data.dataset import Split, Transform
from paceline.data.image_transforms import (
    CROP_PAD,
    CUTOUT_SIDE,
    SHIFT_PAD,
    Augmenter,
    AugmentParams,
)
from paceline.data.pipeline import EvaluationPipeline, InputPipeline, bounds_of
from paceline.data.sampling import GlobalBatchSampler

_MAX_GPU_MEMORY_FRACTION = 0.5
"""A split is kept on the GPU if it needs at most this fraction of the free GPU memory."""


class ResidentPipeline(InputPipeline):
    """Gathers batches on the device that holds the samples."""

    def __init__(
        self,
        split: Split,
        transform: Transform | None,
        order: GlobalBatchSampler,
        augment: Sequence[str] = (),
        seed: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        super().__init__(
            split,
            transform,
            order,
            augment,
            seed,
            dtype=dtype,
            device=device,
            channels_last=channels_last,
        )
        device = self._device
        self._targets = _upload(split.targets, device)
        self._windows = None
        if self._augmenter is None:
            self._inputs = _upload(split.inputs, self._device)
        else:
            self._windows = _Windows(split.inputs.to(device), self._augmenter)
        columns = 1 if self._windows is None else len(_Windows.COLUMNS)
        self._table = torch.zeros(order.samples, columns, dtype=torch.int64, device=device)
        self._table_epoch: int | None = None
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._offsets = torch.arange(order.batch_size, device=device)

    def seek(self, epoch: int, index: int) -> None:
        super().seek(epoch, index)
        if self._table_epoch != epoch:
            self._write_table(epoch)
            self._table_epoch = epoch
        self._position.fill_(self._first)

    def _write_table(self, epoch: int) -> None:
        rows = self.order.permutation(epoch)
        if self._windows is None:
            table = rows.unsqueeze(1)
        else:
            table = self._windows.table(rows, self._augment_params(epoch))
        if self._device.type == "cuda":
            # A copy from pinned memory does not wait for the GPU.
            table = table.pin_memory()
        self._table.copy_(table, non_blocking=True)

    def gather(self, part: slice | None = None) -> tuple[Tensor, Tensor]:
        begin, end = bounds_of(part, self._samples)
        entries = self._table.index_select(0, self._position + self._offsets[begin:end])
        rows = entries[:, 0]
        targets = self._targets.index_select(0, rows).to(self._split.target_dtype)
        if self._windows is None:
            inputs = self._inputs.index_select(0, rows)
        else:
            inputs = self._windows.gather(entries)
        return self._convert(inputs), targets


class ResidentEvaluationPipeline(EvaluationPipeline):
    """Gathers the batches of a split in its order on the device that holds the samples."""

    def __init__(
        self,
        split: Split,
        transform: Transform | None,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        resident = Split(_upload(split.inputs, device), _upload(split.targets, device))
        super().__init__(
            resident, transform, batch_size, device=device, channels_last=channels_last
        )
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._offsets = torch.arange(min(batch_size, len(split)), device=device)

    def seek(self, first: int) -> None:
        self._position.fill_(first)

    def gather(self, samples: int) -> tuple[Tensor, Tensor]:
        rows = self._position + self._offsets[:samples]
        targets = self._split.targets.index_select(0, rows).to(self._split.target_dtype)
        return self._convert(self._split.inputs.index_select(0, rows)), targets


def _upload(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy to the device; small dtypes of tokens stay small."""
    # CUDA has few operations on uint16, a common dtype of token files.
    return values.to(device, torch.int32 if values.dtype == torch.uint16 else values.dtype)


class _Windows:
    """Images with a border, of which each sample takes a window; it may be flipped or cut out."""

    COLUMNS = ("row", "top", "left", "direction", "cut_row", "cut_column")
    """The entries of a sample. `left` is the column of its first pixel in the border image, and
    `direction` leads to the next one: 1, or -1 if the image is flipped."""

    def __init__(self, images: Tensor, augmenter: Augmenter) -> None:
        """`augmenter` defines the transforms."""
        self._kinds = kinds = augmenter.kinds
        self._flips, self._fill = augmenter.flips, augmenter.fill
        height, width = images.shape[2:]
        if "crop" in kinds:
            self._pad = CROP_PAD
            bordered = F.pad(images, [self._pad] * 4)
        elif "shift" in kinds:
            self._pad = SHIFT_PAD
            bordered = _repeat_edges(images, self._pad)
        else:
            self._pad, bordered = 0, images
        # Channels last: then all channels of a pixel are copied together.
        self._images = bordered.permute(0, 2, 3, 1).contiguous()
        self._width_with_border = width + 2 * self._pad
        self._rows = torch.arange(height, dtype=torch.int64, device=images.device)
        self._columns = torch.arange(width, dtype=torch.int64, device=images.device)

    def table(self, rows: Tensor, params: AugmentParams) -> Tensor:
        """Return the entries of all samples, on the CPU."""
        top = left = np.zeros_like(params.top)
        if "crop" in self._kinds:
            top, left = params.top, params.left
        elif "shift" in self._kinds:
            top, left = params.down, params.right
        direction = np.ones_like(left)
        if self._flips:
            direction = 1 - 2 * params.flipped
            left = np.where(params.flipped, self._width_with_border - 1 - left, left)
        columns = (rows.numpy(), top, left, direction, params.cut_row, params.cut_column)
        return torch.from_numpy(np.stack(columns, 1))

    def gather(self, entries: Tensor) -> Tensor:
        """Return one image per entry."""
        row, top, left, direction, cut_row, cut_column = entries.unsqueeze(2).unbind(1)
        y = top + self._rows
        x = torch.addcmul(left, direction, self._columns)
        chosen = self._images[row.unsqueeze(2), y.unsqueeze(2), x.unsqueeze(1)]
        images = chosen.permute(0, 3, 1, 2)
        if "cutout" in self._kinds:
            is_cut = _in_square(cut_row, self._rows).unsqueeze(2) & _in_square(
                cut_column, self._columns
            ).unsqueeze(1)
            images = torch.where(is_cut.unsqueeze(1), self._fill, images)
        return images


def _repeat_edges(images: Tensor, pad: int) -> Tensor:
    """Return images with a border that repeats the pixels at the edges."""
    height, width = images.shape[2:]
    rows, columns = (
        torch.arange(-pad, length + pad, device=images.device).clamp_(0, length - 1)
        for length in (height, width)
    )
    return images.index_select(2, rows).index_select(3, columns)


def _in_square(center: Tensor, indices: Tensor) -> Tensor:
    offset = indices - (center - CUTOUT_SIDE // 2)
    return (offset >= 0) & (offset < CUTOUT_SIDE)


def pipeline_for(
    split: Split,
    transform: Transform | None,
    order: GlobalBatchSampler,
    augment: Sequence[str] = (),
    seed: int = 0,
    *,
    device: torch.device,
    channels_last: bool = False,
) -> InputPipeline:
    """Return the pipeline of a dataset: on the GPU if the dataset fits there, else on the CPU."""
    is_resident = device.type == "cuda" and fits_on_gpu(split, device)
    kind = ResidentPipeline if is_resident else InputPipeline
    return kind(split, transform, order, augment, seed, device=device, channels_last=channels_last)


def evaluation_pipeline_for(
    split: Split,
    transform: Transform | None,
    batch_size: int,
    *,
    device: torch.device,
    channels_last: bool = False,
) -> EvaluationPipeline:
    """Return the pipeline of a test set: on the GPU if it fits there, else on the CPU."""
    is_resident = device.type == "cuda" and fits_on_gpu(split, device)
    kind = ResidentEvaluationPipeline if is_resident else EvaluationPipeline
    return kind(split, transform, batch_size, device=device, channels_last=channels_last)


def fits_on_gpu(split: Split, device: torch.device) -> bool:
    """Return whether a GPU has enough free memory for a split, including borders of images."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    needed_bytes = split.inputs.nbytes + split.targets.nbytes
    if split.inputs.dim() == 4:
        height, width = split.inputs.shape[2:]
        border = (height + 2 * CROP_PAD) * (width + 2 * CROP_PAD) / (height * width)
        needed_bytes += round(split.inputs.nbytes * border)
    return needed_bytes <= free_bytes * _MAX_GPU_MEMORY_FRACTION
