"""Load the dataset of a run configuration: a registered one, or a user-defined function.

A user-defined dataset is a function without arguments that returns
((train_x, train_y), (test_x, test_y)), all tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeGuard, cast

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.data import DATASETS
from paceline.data.dataset import Dataset, LoadRequest, Split
from paceline.data.image_transforms import ImageTransform
from paceline.errors import ConfigError, DataError, error_line
from paceline.registry import load_user_object

_RETURN_FORMAT = "((train_x, train_y), (test_x, test_y)), all tensors"


def load_dataset(config: RunConfig) -> Dataset:
    """Load `config.data`, truncated to --train-samples and --test-samples.

    Raises ConfigError if the dataset does not fit the rest of the configuration.
    """
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
    if config.normalize == "image":
        assert dataset.transform is not None, "checked above"
        transform = dataclasses.replace(dataset.transform, per_image=True)
        dataset = dataclasses.replace(dataset, transform=transform)
    return dataset


def _check(config: RunConfig, dataset: Dataset) -> list[str]:
    problems = []
    for flag, requested, split in (
        ("--train-samples", config.train_samples, dataset.train),
        ("--test-samples", config.test_samples, dataset.test),
    ):
        if requested is not None and requested > len(split):
            problems.append(
                f"{flag}: must be at most {len(split)}, the size of {dataset.name}, got {requested}"
            )
    samples, batch = len(dataset.train), config.global_batch_size
    if batch > samples:
        flag, limit, value = "--batch-size", samples, batch
        if config.batch_per_worker is not None:
            flag, limit = "--batch-per-worker", samples // config.workers
            value = config.batch_per_worker
        problems.append(
            f"{flag}: must be at most {limit} for a training set of {samples} samples, got {value}"
        )
    if dataset.transform is None:
        problems += [
            f"{flag}: requires uint8 images, but {dataset.name} does not hold them"
            for flag, is_used in (
                ("--augment", bool(config.augment)),
                ("--normalize image", config.normalize == "image"),
                ("--eval-views", config.eval_views > 1),
            )
            if is_used
        ]
    return problems


def load_custom(name: str, function: Callable[[], object]) -> Dataset:
    """Call a user-defined dataset function and validate its result; errors are one-line DataErrors.

    uint8 tensors are images, normalized by the mean and standard deviation of each channel of the
    training split; floats are not normalized.
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
            f"{where}: train_x and test_x must have the same sample shape and dtype, "
            f"got {_kind(train.inputs)} and {_kind(test.inputs)}"
        )
    is_images = train.inputs.dtype == torch.uint8
    transform = ImageTransform.from_images(train.inputs) if is_images else None
    classes = int(max(train.targets.max(), test.targets.max())) + 1
    return Dataset(name, train, test, classes, transform)


def _unpack(where: str, returned: object) -> tuple[Split, Split]:
    if not _is_pair(returned):
        raise DataError(f"{where}: the function must return {_RETURN_FORMAT}")
    splits = []
    for split_name, pair in zip(("train", "test"), returned, strict=True):
        tensors = [item for item in pair if isinstance(item, Tensor)] if _is_pair(pair) else []
        if len(tensors) != 2:
            raise DataError(f"{where}: the function must return {_RETURN_FORMAT}")
        splits.append(_check_split(where, split_name, *tensors))
    return splits[0], splits[1]


def _is_pair(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, tuple | list) and len(value) == 2


def _check_split(where: str, name: str, inputs: Tensor, targets: Tensor) -> Split:
    x, y = f"{where}: {name}_x", f"{where}: {name}_y"
    inputs, targets = inputs.detach(), targets.detach()
    if inputs.dtype == torch.uint8:
        if inputs.dim() != 4:
            raise DataError(
                f"{x}: uint8 images must have shape (samples, channels, height, width), "
                f"got {_shape(inputs)}"
            )
    elif not inputs.is_floating_point():
        raise DataError(f"{x} must be uint8 images or floats, got {_dtype(inputs)}")
    if inputs.dim() < 2:
        raise DataError(f"{x} must have at least two dimensions, got {_shape(inputs)}")
    if targets.dtype == torch.bool or targets.is_floating_point() or targets.is_complex():
        raise DataError(f"{y} must have an integer dtype such as int64, got {_dtype(targets)}")
    if targets.dim() == 1 and len(inputs) != len(targets):
        raise DataError(f"{x} has {len(inputs)} samples but {name}_y has {len(targets)} labels")
    # A label per position, such as a time step, needs a feature dimension after the positions.
    positions = 1 if inputs.dtype == torch.uint8 else inputs.dim() - 1
    if not targets.dim() or targets.shape != inputs.shape[: min(targets.dim(), positions)]:
        raise DataError(
            f"{y} must have one label per sample, or per position of a sample of floats, "
            f"got {_shape(targets)} for inputs of {_shape(inputs)}"
        )
    if not inputs.numel():
        raise DataError(f"{x} is empty: return at least one sample")
    if int(targets.min()) < 0:
        raise DataError(f"{y} must not be negative, got {int(targets.min())}")
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        raise DataError(f"{x} must be finite, but contains NaN or infinity")
    return Split(inputs.contiguous(), targets)


def _kind(tensor: Tensor) -> str:
    return f"{_dtype(tensor)} of shape {tuple(tensor.shape[1:])}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"
