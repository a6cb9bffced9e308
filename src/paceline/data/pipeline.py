"""Input pipeline: gather the samples of a batch, augment and normalize them.

All steps operate on whole batches. `InputPipeline` yields training batches by epoch and index,
`evaluation_batches` iterates over a split once in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.data.dataset import Split
from paceline.data.image_transforms import Augmenter, AugmentParams, draw_augment_params
from paceline.data.sampling import GlobalBatchSampler

_MAX_GPU_MEMORY_FRACTION = 0.5
"""A split is kept on the GPU if it needs at most this fraction of the free GPU memory."""


class Normalizer:
    """Converts uint8 to floats as (x / 255 - mean) / std per channel, in one fused multiply-add.

    Other dtypes keep their values and are only moved to the requested device, dtype and layout.
    """

    def __init__(
        self,
        sample_shape: Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.sample_shape = tuple(sample_shape)
        is_image = len(sample_shape) == 3
        self.layout = torch.channels_last if channels_last and is_image else torch.contiguous_format
        mean64 = torch.tensor(mean or (0.0,), dtype=torch.float64)
        std64 = torch.tensor(std or (1.0,), dtype=torch.float64)
        self._scale = self._expand(1 / (255 * std64))
        self._shift = self._expand(-mean64 / std64)

    def _expand(self, channels: Tensor) -> Tensor:
        """Expand to one value per element of a sample; broadcasting over pixels is slower."""
        per_channel = channels.view(-1, *(1 for _ in self.sample_shape[1:]))
        full = per_channel.expand(self.sample_shape).unsqueeze(0).to(self.device, torch.float32)
        return full.contiguous(memory_format=self.layout)

    def __call__(self, inputs: Tensor) -> Tensor:
        if inputs.dtype != torch.uint8:
            dtype = self.dtype if inputs.is_floating_point() else inputs.dtype
            return inputs.to(self.device, dtype, memory_format=self.layout)
        inputs = inputs.to(self.device)
        # The conversion creates a new tensor, so the arithmetic can be done in place.
        values = inputs.to(torch.float32, memory_format=self.layout)
        torch.addcmul(self._shift, values, self._scale, out=values)
        return values.to(self.dtype)


class InputPipeline:
    """Training batches by epoch and index; the same arguments always give the same batch."""

    def __init__(
        self,
        split: Split,
        mean: Sequence[float],
        std: Sequence[float],
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
        shape = split.inputs.shape[1:]
        self._normalizer = Normalizer(
            shape, mean, std, dtype=dtype, device=device, channels_last=channels_last
        )
        device = _storage_device(split, self._normalizer.device)
        self._inputs = split.inputs.to(device)
        self._labels = split.labels.to(device, torch.int64)
        self._augmenter: Augmenter | None = None
        if augment:
            fill = tuple(round(255 * value) for value in mean) or (0,)
            self._augmenter = Augmenter(augment, fill, self._normalizer.device)
        self._epoch_rows: tuple[int, Tensor] | None = None
        self._epoch_params: tuple[int, AugmentParams] | None = None

    def batch(self, epoch: int, index: int, part: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs and int64 labels of global batch `index`, or of the slice `part` of it."""
        first = index * self.order.batch_size
        samples = min(self.order.batch_size, self.order.samples - first)
        begin, end, _ = slice(None).indices(samples) if part is None else part.indices(samples)
        chosen = slice(first + begin, first + max(begin, end))
        rows = self._rows(epoch)[chosen]
        labels = self._labels.index_select(0, rows).to(self._normalizer.device)
        if self._augmenter is None:
            inputs = self._inputs.index_select(0, rows)
        else:
            params = self._augment_params(epoch).part(chosen)
            inputs = self._augmenter.gather(self._inputs, rows, params)
        return self._normalizer(inputs), labels

    def _rows(self, epoch: int) -> Tensor:
        """Return the sample order of an epoch on the device that holds the split."""
        if self._inputs.device.type == "cpu":
            return self.order.permutation(epoch)
        if self._epoch_rows is None or self._epoch_rows[0] != epoch:
            self._epoch_rows = (epoch, self.order.permutation(epoch).to(self._inputs.device))
        return self._epoch_rows[1]

    def _augment_params(self, epoch: int) -> AugmentParams:
        if self._epoch_params is None or self._epoch_params[0] != epoch:
            height, width = self._normalizer.sample_shape[1:]
            params = draw_augment_params(self.seed, epoch, self.order.samples, height, width)
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
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    channels_last: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every sample once in the order of the split; the last batch may be smaller."""
    normalizer = Normalizer(
        split.inputs.shape[1:], mean, std, dtype=dtype, device=device, channels_last=channels_last
    )
    for begin in range(0, len(split), batch_size):
        chosen = slice(begin, begin + batch_size)
        labels = split.labels[chosen].to(normalizer.device, torch.int64)
        yield normalizer(split.inputs[chosen]), labels
