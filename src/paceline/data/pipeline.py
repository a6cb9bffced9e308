"""From a split to the model's input: gather, change, normalise, a few passes over a whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.data.dataset import Split
from paceline.data.image_transforms import Augmenter, AugmentParams, draw_changes
from paceline.data.sampling import GlobalBatchSampler

_GPU_SHARE = 0.5
"""A split is kept on the GPU when it takes at most this part of the memory that is free there."""


class Normalizer:
    """Bytes to floats: (x / 255 - mean) / std for each channel, as one multiplication and addition.

    Anything but uint8 keeps its values and only moves to the device, type and layout asked for.
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
        self._scale = self._spread(1 / (255 * std64))
        self._shift = self._spread(-mean64 / std64)

    def _spread(self, channels: Tensor) -> Tensor:
        """One value for each element of a sample: broadcasting over pixels as well is slower."""
        across = channels.view(-1, *(1 for _ in self.sample_shape[1:]))
        full = across.expand(self.sample_shape).unsqueeze(0).to(self.device, torch.float32)
        return full.contiguous(memory_format=self.layout)

    def __call__(self, inputs: Tensor) -> Tensor:
        if inputs.dtype != torch.uint8:
            kind = self.dtype if inputs.is_floating_point() else inputs.dtype
            return inputs.to(self.device, kind, memory_format=self.layout)
        inputs = inputs.to(self.device)
        # The conversion makes a new tensor, so that the arithmetic can be done in place.
        values = inputs.to(torch.float32, memory_format=self.layout)
        torch.addcmul(self._shift, values, self._scale, out=values)
        return values.to(self.dtype)


class InputPipeline:
    """The training batches of a run, by epoch and number; asked again, the same ones."""

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
        self._normaliser = Normalizer(
            shape, mean, std, dtype=dtype, device=device, channels_last=channels_last
        )
        where = _home_of(split, self._normaliser.device)
        self._inputs = split.inputs.to(where)
        self._labels = split.labels.to(where, torch.int64)
        self._augmenter: Augmenter | None = None
        if augment:
            fill = tuple(round(255 * value) for value in mean) or (0,)
            self._augmenter = Augmenter(augment, fill, self._normaliser.device)
        self._epoch_rows: tuple[int, Tensor] | None = None
        self._epoch_changes: tuple[int, AugmentParams] | None = None

    def batch(self, epoch: int, index: int, part: slice | None = None) -> tuple[Tensor, Tensor]:
        """Model input and int64 labels of global batch `index`, or of a part of its samples."""
        first = index * self.order.batch_size
        samples = min(self.order.batch_size, self.order.samples - first)
        begin, end, _ = slice(None).indices(samples) if part is None else part.indices(samples)
        chosen = slice(first + begin, first + max(begin, end))
        rows = self._rows(epoch)[chosen]
        labels = self._labels.index_select(0, rows).to(self._normaliser.device)
        if self._augmenter is None:
            inputs = self._inputs.index_select(0, rows)
        else:
            changes = self._changes(epoch).part(chosen)
            inputs = self._augmenter.gather(self._inputs, rows, changes)
        return self._normaliser(inputs), labels

    def _rows(self, epoch: int) -> Tensor:
        """An epoch's order of samples, where the split is."""
        if self._inputs.device.type == "cpu":
            return self.order.permutation(epoch)
        if self._epoch_rows is None or self._epoch_rows[0] != epoch:
            self._epoch_rows = (epoch, self.order.permutation(epoch).to(self._inputs.device))
        return self._epoch_rows[1]

    def _changes(self, epoch: int) -> AugmentParams:
        if self._epoch_changes is None or self._epoch_changes[0] != epoch:
            height, width = self._normaliser.sample_shape[1:]
            drawn = draw_changes(self.seed, epoch, self.order.samples, height, width)
            self._epoch_changes = (epoch, drawn)
        return self._epoch_changes[1]


def _home_of(split: Split, device: torch.device) -> torch.device:
    """Where a split is gathered from: the GPU that uses it if it fits there, else where it is."""
    if device.type != "cuda":
        return split.inputs.device
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return device if split.inputs.nbytes <= free_bytes * _GPU_SHARE else split.inputs.device


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
    """Every sample once, in the split's own order; the last batch holds what is left."""
    normaliser = Normalizer(
        split.inputs.shape[1:], mean, std, dtype=dtype, device=device, channels_last=channels_last
    )
    for begin in range(0, len(split), batch_size):
        chosen = slice(begin, begin + batch_size)
        labels = split.labels[chosen].to(normaliser.device, torch.int64)
        yield normaliser(split.inputs[chosen]), labels
