"""Load the dataset of a run configuration: a registered one, or a user-defined function.

A user-defined dataset is a function without arguments that returns
((train_x, train_y), (test_x, test_y)), all tensors, and for tokens optionally a third value, the
size of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeGuard, cast

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.data import DATASETS
from paceline.data.dataset import Dataset, LoadRequest, Split, TokenTransform, Transform
from paceline.data.image_transforms import ImageTransform
from paceline.errors import ConfigError, DataError, error_line
from paceline.registry import load_user_object

_RETURN_FORMAT = "((train_x, train_y), (test_x, test_y)), all tensors"


def load_dataset(config: RunConfig) -> Dataset:
    """Load `config.data`, truncated to --train-samples and --test-samples.

    Raises ConfigError if the dataset does not fit the rest of the configuration.
    """
    DATASETS.check(config.data)
    entry, path = DATASETS.split(config.data)
    if entry:
        dataset = DATASETS.load(config.data)(
            LoadRequest(
                folder=config.data_dir,
                train_samples=config.train_samples,
                test_samples=config.test_samples,
                resident_limit_bytes=config.resident_limit_mib << 20,
                path=path,
                context=config.context,
                text_test_fraction=config.text_test_fraction,
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
        assert isinstance(dataset.transform, ImageTransform), "checked above"
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
    if config.context is not None and not _is_text(dataset):
        problems.append(
            f"--context: applies to text:PATH and stories, but samples of {dataset.name} have"
            f" shape {dataset.sample_shape}"
        )
    if config.text_test_fraction is not None and not DATASETS.split(config.data)[1]:
        problems.append(f"--text-test-fraction: applies to text:PATH, not to {dataset.name}")
    if not isinstance(dataset.transform, ImageTransform):
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


def _is_text(dataset: Dataset) -> bool:
    return isinstance(dataset.transform, TokenTransform) and dataset.transform.is_bytes


def load_custom(name: str, function: Callable[[], object]) -> Dataset:
    """Call a user-defined dataset function and validate its result; errors are one-line DataErrors.

    uint8 tensors are images, normalized by the mean and standard deviation of each channel of the
    training split; floats are not normalized. Other integers are tokens, and so are uint8 tensors
    with a vocabulary.
    """
    where = f"data {name!r}"
    try:
        returned = function()
    except Exception as error:
        cause = error_line(error)
        raise DataError(f"{where}: the function failed: {cause}") from error
    train, test, vocabulary = _unpack(where, returned)
    if train.inputs.shape[1:] != test.inputs.shape[1:] or train.inputs.dtype != test.inputs.dtype:
        raise DataError(
            f"{where}: train_x and test_x must have the same sample shape and dtype, "
            f"got {_kind(train.inputs)} and {_kind(test.inputs)}"
        )
    if vocabulary is not None:
        return Dataset(name, train, test, vocabulary, TokenTransform())
    indices = [train.targets, test.targets]
    transform: Transform | None = None
    if _is_tokens(train.inputs, vocabulary):
        transform = TokenTransform()
        indices += [train.inputs, test.inputs]
    elif train.inputs.dtype == torch.uint8:
        transform = ImageTransform.from_images(train.inputs)
    classes = max(_bounds(tensor)[1] for tensor in indices) + 1
    return Dataset(name, train, test, classes, transform)


def _is_tokens(inputs: Tensor, vocabulary: int | None) -> bool:
    if inputs.is_floating_point():
        return False
    return vocabulary is not None or inputs.dtype != torch.uint8


def _unpack(where: str, returned: object) -> tuple[Split, Split, int | None]:
    vocabulary = None
    if isinstance(returned, tuple | list) and len(returned) == 3:
        *returned, vocabulary = returned
        if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or vocabulary < 1:
            raise DataError(
                f"{where}: the third value must be the size of the vocabulary, a number above 0"
            )
    if not _is_pair(returned):
        raise DataError(f"{where}: the function must return {_RETURN_FORMAT}")
    splits = []
    for split_name, pair in zip(("train", "test"), returned, strict=True):
        tensors = [item for item in pair if isinstance(item, Tensor)] if _is_pair(pair) else []
        if len(tensors) != 2:
            raise DataError(f"{where}: the function must return {_RETURN_FORMAT}")
        inputs, targets = tensors
        splits.append(_check_split(where, split_name, inputs, targets, vocabulary))
    return splits[0], splits[1], vocabulary


def _is_pair(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, tuple | list) and len(value) == 2


def _check_split(
    where: str, name: str, inputs: Tensor, targets: Tensor, vocabulary: int | None
) -> Split:
    x, y = f"{where}: {name}_x", f"{where}: {name}_y"
    inputs, targets = inputs.detach(), targets.detach()
    is_tokens = _is_tokens(inputs, vocabulary)
    if inputs.dtype == torch.bool or inputs.is_complex():
        raise DataError(f"{x} must be uint8 images, integer tokens or floats, got {_dtype(inputs)}")
    if vocabulary is not None and not is_tokens:
        raise DataError(f"{x} must be integers below the vocabulary, got {_dtype(inputs)}")
    if inputs.dtype == torch.uint8 and not is_tokens and inputs.dim() != 4:
        raise DataError(
            f"{x}: uint8 images must have shape (samples, channels, height, width), "
            f"got {_shape(inputs)}; for bytes of text, also return the vocabulary, 256"
        )
    if inputs.dim() < 2:
        raise DataError(f"{x} must have at least two dimensions, got {_shape(inputs)}")
    if targets.dtype == torch.bool or targets.is_floating_point() or targets.is_complex():
        raise DataError(f"{y} must have an integer dtype such as int64, got {_dtype(targets)}")
    if targets.dim() == 1 and len(inputs) != len(targets):
        raise DataError(f"{x} has {len(inputs)} samples but {name}_y has {len(targets)} labels")
    if is_tokens:
        _check_tokens(where, name, inputs, targets, vocabulary)
        return Split(inputs.contiguous(), targets)
    # A label per position, such as a time step, needs a feature dimension after the positions.
    positions = 1 if inputs.dtype == torch.uint8 else inputs.dim() - 1
    if not targets.dim() or targets.shape != inputs.shape[: min(targets.dim(), positions)]:
        raise DataError(
            f"{y} must have one label per sample, or per position of a sample of floats, "
            f"got {_shape(targets)} for inputs of {_shape(inputs)}"
        )
    if not inputs.numel():
        raise DataError(f"{x} is empty: return at least one sample")
    low, _ = _bounds(targets)
    if low < 0:
        raise DataError(f"{y} must not be negative, got {low}")
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        raise DataError(f"{x} must be finite, but contains NaN or infinity")
    return Split(inputs.contiguous(), targets)


def _check_tokens(
    where: str, name: str, inputs: Tensor, targets: Tensor, vocabulary: int | None
) -> None:
    """Check that targets belong to samples, and that all indices are in the vocabulary."""
    if not targets.dim() or len(targets) != len(inputs):
        raise DataError(
            f"{where}: {name}_y must have the samples in its first dimension, as {name}_x has, "
            f"got {_shape(targets)} for inputs of {_shape(inputs)}"
        )
    for part, tensor in (("x", inputs), ("y", targets)):
        if not tensor.numel():
            raise DataError(f"{where}: {name}_{part} is empty: return at least one token")
        low, high = _bounds(tensor)
        if low < 0:
            raise DataError(f"{where}: {name}_{part} must not be negative, got {low}")
        if vocabulary is not None and high >= vocabulary:
            raise DataError(
                f"{where}: {name}_{part} has {high}, outside the vocabulary of {vocabulary} tokens"
            )


def _bounds(tensor: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest value."""
    if tensor.dtype == torch.uint16:  # which torch cannot compare
        values = tensor.numpy()
        return int(values.min()), int(values.max())
    low, high = tensor.aminmax()
    return int(low), int(high)


def _kind(tensor: Tensor) -> str:
    return f"{_dtype(tensor)} of shape {tuple(tensor.shape[1:])}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"
