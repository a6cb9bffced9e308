"""A user's own data: a function that returns ((train_x, train_y), (test_x, test_y)).

The dataset that a config asks for, checked against the rest of the config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeGuard, cast

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.data import DATASETS
from paceline.data.dataset import Dataset, LoadRequest, Split
from paceline.errors import ConfigError, DataError, error_line
from paceline.registry import load_user_object

_FORM = "((train_x, train_y), (test_x, test_y)), all of them tensors"


def load_custom(name: str, function: Callable[[], object]) -> Dataset:
    """Call the function and check what it returns; every fault is one DataError line.

    uint8 images are normalised by their channels' mean and deviation; floats are taken as they are.
    """
    where = f"data {name!r}"
    try:
        returned = function()
    except Exception as error:
        cause = error_line(error)
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


def load_dataset(config: RunConfig) -> Dataset:
    """Load `config.data`, cut to --train-samples and --test-samples; what cannot be, is refused."""
    DATASETS.check(config.data)
    if config.data in DATASETS:
        dataset = DATASETS.load(config.data)(
            LoadRequest(
                folder=config.data_dir,
                train_samples=config.train_samples,
                test_samples=config.test_samples,
                resident_limit_bytes=config.resident_limit_mib << 20,
            )
        )
    else:
        function = load_user_object(DATASETS.kind, config.data)
        dataset = load_custom(config.data, cast("Callable[[], object]", function))
    dataset = dataclasses.replace(
        dataset,
        train=dataset.train.head(config.train_samples),
        test=dataset.test.head(config.test_samples),
    )
    problems = _check(config, dataset)
    if problems:
        raise ConfigError(problems)
    return dataset


def _check(config: RunConfig, dataset: Dataset) -> list[str]:
    problems = []
    for flag, asked, split in (
        ("--train-samples", config.train_samples, dataset.train),
        ("--test-samples", config.test_samples, dataset.test),
    ):
        if asked is not None and asked > len(split):
            problems.append(
                f"{flag}: must be at most {len(split)}, all that {dataset.name} has, got {asked}"
            )
    samples, batch = len(dataset.train), config.global_batch_size
    if batch > samples:
        flag, limit, given = "--batch-size", samples, batch
        if config.batch_per_worker is not None:
            flag, limit = "--batch-per-worker", samples // config.workers
            given = config.batch_per_worker
        problems.append(
            f"{flag}: must be at most {limit}, for a training set of {samples}, got {given}"
        )
    if config.augment and dataset.train.inputs.dtype != torch.uint8:
        problems.append(f"--augment: needs images of bytes, and {dataset.name} holds floats")
    return problems
