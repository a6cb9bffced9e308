"""Input pipeline: gather the samples of a batch and transform them into inputs of the model.

All steps operate on whole batches. `InputPipeline` returns training batches by epoch and index,
`evaluation_batches` iterates over a split once in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paceline.data.dataset import Split
from paceline.data.image_transforms import (
    Augmenter,
    AugmentParams,
    ImageTransform,
    Normalizer,
    draw_augment_params,
    with_alternate_flips,
)
from paceline.data.sampling import GlobalBatchSampler

_MAX_GPU_MEMORY_FRACTION = 0.5
"""A split is kept on the GPU if it needs at most this fraction of the free GPU memory."""


class InputPipeline:
    """Training batches by epoch and index; the same arguments always give the same batch."""

    def __init__(
        self,
        split: Split,
        transform: ImageTransform | None,
        order: GlobalBatchSampler,
        augment: Sequence[str] = (),
        seed: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        self.order = order
        self.seed = seed
        self._device = torch.device(device)
        self._convert = _converter(split, transform, dtype, self._device, channels_last)
        storage_device = _storage_device(split, self._device)
        self._inputs = split.inputs.to(storage_device)
        self._targets = split.targets.to(storage_device)
        self._augmenter: Augmenter | None = None
        if augment:
            assert transform is not None, "load_dataset checks that --augment gets images"
            self._augmenter = Augmenter(augment, transform.mean_pixel, self._device)
        self._epoch_rows: tuple[int, Tensor] | None = None
        self._epoch_params: tuple[int, AugmentParams] | None = None

    def batch(self, epoch: int, index: int, part: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs and int64 targets of global batch `index`, or of the slice `part` of it."""
        first = index * self.order.batch_size
        samples = min(self.order.batch_size, self.order.samples - first)
        begin, end, _ = slice(None).indices(samples) if part is None else part.indices(samples)
        chosen = slice(first + begin, first + max(begin, end))
        rows = self._rows(epoch)[chosen]
        targets = self._targets.index_select(0, rows).to(self._device, torch.int64)
        if self._augmenter is None:
            inputs = self._inputs.index_select(0, rows)
        else:
            params = self._augment_params(epoch).part(chosen)
            inputs = self._augmenter.gather(self._inputs, rows, params)
        return self._convert(inputs), targets

    def _rows(self, epoch: int) -> Tensor:
        """Return the sample order of an epoch on the device that holds the split."""
        if self._inputs.device.type == "cpu":
            return self.order.permutation(epoch)
        if self._epoch_rows is None or self._epoch_rows[0] != epoch:
            self._epoch_rows = (epoch, self.order.permutation(epoch).to(self._inputs.device))
        return self._epoch_rows[1]

    def _augment_params(self, epoch: int) -> AugmentParams:
        if self._epoch_params is None or self._epoch_params[0] != epoch:
            height, width = self._inputs.shape[2:]
            params = draw_augment_params(self.seed, epoch, self.order.samples, height, width)
            assert self._augmenter is not None
            if "alternate_flip" in self._augmenter.kinds:
                rows = self.order.permutation(epoch).numpy()
                params = with_alternate_flips(params, self.seed, epoch, rows)
            self._epoch_params = (epoch, params)
        return self._epoch_params[1]


def _storage_device(split: Split, device: torch.device) -> torch.device:
    """Return the device that holds the split: the GPU if the split fits, otherwise unchanged."""
    if device.type != "cuda":
        return split.inputs.device
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return (
        device
        if split.inputs.nbytes <= free_bytes * _MAX_GPU_MEMORY_FRACTION
        else split.inputs.device
    )


def evaluation_batches(
    split: Split,
    transform: ImageTransform | None,
    batch_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    channels_last: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every sample once in the order of the split; the last batch may be smaller."""
    device = torch.device(device)
    convert = _converter(split, transform, dtype, device, channels_last)
    for begin in range(0, len(split), batch_size):
        chosen = slice(begin, begin + batch_size)
        targets = split.targets[chosen].to(device, torch.int64)
        yield convert(split.inputs[chosen]), targets


def _converter(
    split: Split,
    transform: ImageTransform | None,
    dtype: torch.dtype,
    device: torch.device,
    channels_last: bool,
) -> Callable[[Tensor], Tensor]:
    """Return the conversion from stored inputs to inputs of the model."""
    sample_shape = split.inputs.shape[1:]
    if transform is not None:
        return Normalizer(
            transform, sample_shape, dtype=dtype, device=device, channels_last=channels_last
        )
    is_image = len(sample_shape) == 3
    layout = torch.channels_last if channels_last and is_image else torch.contiguous_format
    kept_dtype = dtype if split.inputs.is_floating_point() else split.inputs.dtype
    return lambda inputs: inputs.to(device, kept_dtype, memory_format=layout)
