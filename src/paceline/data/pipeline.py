"""Input pipeline: gather the samples of a batch and transform them into inputs of the model.

All steps operate on whole batches. `InputPipeline` returns training batches by epoch and index,
`EvaluationPipeline` the batches of a split in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paceline.data.dataset import Split, TokenTransform, Transform
from paceline.data.image_transforms import (
    Augmenter,
    AugmentParams,
    ImageTransform,
    Normalizer,
    draw_augment_params,
    with_alternate_flips,
)
from paceline.data.sampling import GlobalBatchSampler


class InputPipeline:
    """Training batches by epoch and index; the same arguments always give the same batch.

    Samples are gathered on the CPU; resident.py has the pipeline of a dataset on the GPU.
    """

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
        self.order = order
        self.seed = seed
        self._device = torch.device(device)
        self._convert = converter(split, transform, dtype, self._device, channels_last)
        self._split = split
        self._epoch = self._first = self._samples = 0
        self._augmenter: Augmenter | None = None
        if augment:
            assert isinstance(transform, ImageTransform), (
                "load_dataset checks that --augment gets images"
            )
            self._augmenter = Augmenter(augment, transform.mean_pixel, self._device)
        self._epoch_params: tuple[int, AugmentParams] | None = None

    def batch(self, epoch: int, index: int, part: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of global batch `index`, or of the slice `part` of it."""
        self.seek(epoch, index)
        return self.gather(part)

    def seek(self, epoch: int, index: int) -> None:
        """Select the global batch that `gather` returns."""
        self._epoch, self._first = epoch, index * self.order.batch_size
        self._samples = self.order.batch_samples(index)

    def gather(self, part: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the selected batch, or of the slice `part` of it."""
        begin, end = bounds_of(part, self._samples)
        chosen = slice(self._first + begin, self._first + end)
        rows = self.order.permutation(self._epoch)[chosen]
        targets = self._split.targets.index_select(0, rows)
        targets = targets.to(self._device, self._split.target_dtype)
        if self._augmenter is None:
            inputs = self._split.inputs.index_select(0, rows)
        else:
            params = self._augment_params(self._epoch).part(chosen)
            inputs = self._augmenter.gather(self._split.inputs, rows, params)
        return self._convert(inputs), targets

    def _augment_params(self, epoch: int) -> AugmentParams:
        if self._epoch_params is None or self._epoch_params[0] != epoch:
            height, width = self._split.inputs.shape[2:]
            params = draw_augment_params(self.seed, epoch, self.order.samples, height, width)
            assert self._augmenter is not None
            if "alternate_flip" in self._augmenter.kinds:
                rows = self.order.permutation(epoch).numpy()
                params = with_alternate_flips(params, self.seed, epoch, rows)
            self._epoch_params = (epoch, params)
        return self._epoch_params[1]


def bounds_of(part: slice | None, samples: int) -> tuple[int, int]:
    """Return first and last index (exclusive) of a slice of a batch."""
    begin, end, _ = (part or slice(None)).indices(samples)
    return begin, max(begin, end)


class EvaluationPipeline:
    """Batches of a split in its order, gathered on the CPU; the last one may be smaller."""

    def __init__(
        self,
        split: Split,
        transform: Transform | None,
        batch_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        self._split = split
        self._device = torch.device(device)
        self._convert = converter(split, transform, dtype, self._device, channels_last)
        self._first = 0
        starts = range(0, len(split), batch_size)
        self.batches = [(first, min(batch_size, len(split) - first)) for first in starts]
        """First sample and number of samples of each batch."""

    def seek(self, first: int) -> None:
        """Select the first sample that `gather` returns."""
        self._first = first

    def gather(self, samples: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets."""
        chosen = slice(self._first, self._first + samples)
        targets = self._split.targets[chosen].to(self._device, self._split.target_dtype)
        return self._convert(self._split.inputs[chosen]), targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for first, samples in self.batches:
            self.seek(first)
            yield self.gather(samples)


def converter(
    split: Split,
    transform: Transform | None,
    dtype: torch.dtype,
    device: torch.device,
    channels_last: bool,
) -> Callable[[Tensor], Tensor]:
    """Return the conversion from stored inputs to inputs of the model."""
    sample_shape = split.inputs.shape[1:]
    if isinstance(transform, TokenTransform):
        return lambda inputs: inputs.to(device, torch.int64)
    if transform is not None:
        return Normalizer(
            transform, sample_shape, dtype=dtype, device=device, channels_last=channels_last
        )
    is_image = len(sample_shape) == 3
    layout = torch.channels_last if channels_last and is_image else torch.contiguous_format
    return lambda inputs: inputs.to(device, dtype, memory_format=layout)
