"""Load the dataset of a run configuration: a registered one, or a user-defined function.

A user-defined dataset is a function without arguments that returns
((train_x, train_y), (test_x, test_y)), all tensors, and for tokens optionally a third value, the
size of the vocabulary. Targets are class indices, or anything that the loss of the model takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeGuard, cast

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
    if config.context is not None and not dataset.is_text:
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
    splits = (("train", train), ("test", test))
    transform: Transform | None = None
    sizes = []
    if _is_tokens(train.inputs, vocabulary):
        transform = TokenTransform()
        sizes = [_vocabulary_of(f"{where}: {x}_x", one.inputs, vocabulary) for x, one in splits]
    elif train.inputs.dtype == torch.uint8:
        transform = ImageTransform.from_images(train.inputs)
    targets = [_targets_of(f"{where}: {y}_y", one, transform, vocabulary) for y, one in splits]
    classes = vocabulary or max(*sizes, *(one.classes for one in targets))
    problem = next((one.problem for one in targets if one.problem), "")
    return Dataset(name, train, test, classes, transform, target_problem=problem)


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
    if inputs.dim() < (1 if is_tokens else 2):
        raise DataError(f"{x} must have at least two dimensions, got {_shape(inputs)}")
    if targets.is_complex():
        raise DataError(f"{y} must be integers, floats or truth values, got {_dtype(targets)}")
    if not targets.dim() or len(targets) != len(inputs):
        raise DataError(
            f"{y} must have the samples in its first dimension, as {name}_x has, "
            f"got {_shape(targets)} for inputs of {_shape(inputs)}"
        )
    for part, tensor in ((x, inputs), (y, targets)):
        if not tensor.numel():
            raise DataError(f"{part} is empty: return at least one sample")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DataError(f"{part} must be finite, but contains NaN or infinity")
    return Split(inputs.contiguous(), targets)


def _vocabulary_of(name: str, tokens: Tensor, vocabulary: int | None) -> int:
    """Return the size of the smallest vocabulary that contains the tokens of a split."""
    low, high = _bounds(tokens)
    if low < 0:
        raise DataError(f"{name} must not be negative, got {low}")
    if vocabulary is not None and high >= vocabulary:
        raise DataError(f"{name} has {high}, outside the vocabulary of {vocabulary} tokens")
    return high + 1


class _Targets(NamedTuple):
    classes: int
    """Of targets that are not classes: the values per sample, or 0 for tokens."""
    problem: str = ""
    """Why they are not classes."""


def _targets_of(
    name: str, split: Split, transform: Transform | None, vocabulary: int | None
) -> _Targets:
    inputs, targets = split.inputs, split.targets
    values = 0 if isinstance(transform, TokenTransform) else targets[0].numel()
    if split.target_dtype != torch.int64:
        return _Targets(
            values, f"{name} must have an integer dtype such as int64, got {_dtype(targets)}"
        )
    # A label per position, such as a time step, needs a feature dimension after the positions.
    positions = 1 if isinstance(transform, ImageTransform) else inputs.dim() - 1
    is_labeled = targets.shape == inputs.shape[: min(targets.dim(), positions)]
    if not isinstance(transform, TokenTransform) and not is_labeled:
        return _Targets(
            values,
            f"{name} must have one label per sample, or per position of a sample of floats, "
            f"got {_shape(targets)} for inputs of {_shape(inputs)}",
        )
    low, high = _bounds(targets)
    problem = ""
    if low < 0:
        problem = f"{name} must not be negative, got {low}"
    elif vocabulary is not None and high >= vocabulary:
        problem = f"{name} has {high}, outside the vocabulary of {vocabulary} tokens"
    return _Targets(max(high + 1, 1), problem)


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
