"""A user's own data: a function that returns ((train_x, train_y), (test_x, test_y))."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from paceline.data.dataset import Dataset, Split
from paceline.errors import DataError, in_a_line

_FORM = "((train_x, train_y), (test_x, test_y)), all of them tensors"


def load_own(name: str, function: Callable[[], object]) -> Dataset:
    """Call the function and check what it returns; every fault is one DataError line.

    uint8 images are normalised by their channels' mean and deviation; floats are taken as they are.
    """
    where = f"data {name!r}"
    try:
        returned = function()
    except Exception as error:
        cause = in_a_line(error)
        raise DataError(f"{where}: the function failed: {cause}") from error
    train, test = _unpack(where, returned)
    if train.inputs.shape[1:] != test.inputs.shape[1:] or train.inputs.dtype != test.inputs.dtype:
        raise DataError(
            f"{where}: train_x and test_x must hold samples of one kind, "
            f"got {_kind(train.inputs)} and {_kind(test.inputs)}"
        )
    mean, std = channel_statistics(train.inputs)
    classes = int(max(train.labels.max(), test.labels.max())) + 1
    return Dataset(name, train, test, classes, mean, std)


def _unpack(where: str, returned: object) -> tuple[Split, Split]:
    if not _is_pair(returned):
        raise DataError(f"{where}: the function must return {_FORM}")
    splits = []
    for split_name, pair in zip(("train", "test"), returned, strict=True):
        tensors = [item for item in pair if isinstance(item, Tensor)] if _is_pair(pair) else []
        if len(tensors) != 2:
            raise DataError(f"{where}: the function must return {_FORM}")
        splits.append(_check_split(where, split_name, *tensors))
    return splits[0], splits[1]


def _is_pair(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, tuple | list) and len(value) == 2


def _check_split(where: str, name: str, inputs: Tensor, labels: Tensor) -> Split:
    x, y = f"{where}: {name}_x", f"{where}: {name}_y"
    inputs, labels = inputs.detach(), labels.detach()
    if inputs.dtype == torch.uint8:
        if inputs.dim() != 4:
            raise DataError(
                f"{x} must be images of (samples, channels, height, width), got {_shape(inputs)}"
            )
    elif not inputs.is_floating_point():
        raise DataError(f"{x} must be uint8 images or floats, got {_type(inputs)}")
    if inputs.dim() < 2:
        raise DataError(f"{x} must have a dimension besides the samples, got {_shape(inputs)}")
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise DataError(f"{y} must be whole numbers such as int64, got {_type(labels)}")
    if labels.dim() != 1:
        raise DataError(f"{y} must have one label for each sample, got {_shape(labels)}")
    if len(inputs) != len(labels):
        raise DataError(f"{x} has {len(inputs)} samples and {name}_y {len(labels)} labels")
    if not inputs.numel():
        raise DataError(f"{x} is empty: give at least one sample")
    if int(labels.min()) < 0:
        raise DataError(f"{y} must be 0 or above, got {int(labels.min())}")
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        raise DataError(f"{x} must be finite: it holds NaN or infinity")
    return Split(inputs.contiguous(), labels.to(torch.int64))


def channel_statistics(inputs: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel of uint8 images scaled to 0..1; nothing for floats."""
    if inputs.dtype != torch.uint8:
        return (), ()
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in range(inputs.shape[1]):
        counts = torch.bincount(inputs[:, channel].flatten(), minlength=256).to(torch.float64)
        shares = counts / counts.sum()
        mean = float((shares * values).sum())
        deviation = float((shares * (values - mean) ** 2).sum() ** 0.5)
        means.append(mean)
        # A channel of one value carries nothing; any divisor but zero will do.
        deviations.append(deviation or 1.0)
    return tuple(means), tuple(deviations)


def _kind(tensor: Tensor) -> str:
    return f"{_type(tensor)} of {tuple(tensor.shape[1:])}"


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: Tensor) -> str:
    return f"the shape {tuple(tensor.shape)}"
