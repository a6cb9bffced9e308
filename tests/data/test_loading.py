"""Loading of configured and user-defined datasets, with one-line errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import RunConfig
from paceline.data.image_transforms import ImageTransform
from paceline.data.loading import load_custom, load_dataset
from paceline.errors import ConfigError, DataError, UnknownNameError, UserCodeError


def images(samples: int = 6) -> torch.Tensor:
    return torch.arange(samples * 3 * 4 * 4).remainder(256).to(torch.uint8).view(samples, 3, 4, 4)


def returning(train_x: Any, train_y: Any, test_x: Any = None, test_y: Any = None) -> Any:
    """Return a dataset function; the test split defaults to the training split."""
    test = (train_x if test_x is None else test_x, train_y if test_y is None else test_y)
    return lambda: ((train_x, train_y), test)


def with_vocabulary(x: torch.Tensor, y: torch.Tensor, vocabulary: int) -> Any:
    return lambda: ((x, y), (x, y), vocabulary)


tokens = torch.arange(18).view(6, 3)
tokens[5, 2] = 300


def test_custom_images_are_normalized_by_their_own_statistics() -> None:
    dataset = load_custom("mine:data", returning(images(), torch.tensor([0, 1, 2, 0, 1, 2])))
    scaled = images().double() / 255
    assert dataset.classes == 3
    assert dataset.sample_shape == (3, 4, 4)
    assert isinstance(dataset.transform, ImageTransform)
    assert dataset.transform.mean == pytest.approx(scaled.mean((0, 2, 3)).tolist())
    assert dataset.transform.std == pytest.approx(scaled.std((0, 2, 3), correction=0).tolist())


def test_constant_images_get_a_nonzero_std() -> None:
    gray = torch.full((2, 1, 4, 4), 9, dtype=torch.uint8)
    transform = load_custom("mine:data", returning(gray, torch.tensor([0, 1]))).transform
    assert isinstance(transform, ImageTransform)
    assert transform.std == (1.0,)


def test_custom_floats_are_not_normalized() -> None:
    dataset = load_custom("mine:data", returning(torch.randn(4, 7), torch.tensor([0, 1, 1, 0])))
    assert dataset.transform is None
    assert not dataset.has_tokens


def test_class_count_covers_both_splits() -> None:
    few, more = torch.tensor([0, 1]), torch.tensor([0, 4])
    dataset = load_custom("mine:data", returning(torch.ones(2, 3), few, torch.ones(2, 3), more))
    assert dataset.classes == 5


def test_float_sequences_may_have_a_label_per_position() -> None:
    targets = torch.arange(12).view(4, 3) % 5
    dataset = load_custom("mine:data", returning(torch.randn(4, 3, 7), targets))
    assert dataset.classes == 5
    assert torch.equal(dataset.train.targets, targets)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint16])
def test_integers_are_tokens_with_a_vocabulary_of_inputs_and_targets(dtype: torch.dtype) -> None:
    targets = torch.zeros(6, 3, dtype=dtype)
    dataset = load_custom("mine:data", returning(tokens.to(dtype), targets))
    assert dataset.has_tokens
    assert dataset.classes == 301
    assert dataset.sample_shape == (3,)


def test_vocabulary_may_be_larger_than_the_tokens_and_makes_bytes_tokens() -> None:
    some_bytes = torch.arange(18, dtype=torch.uint8).view(6, 3)
    dataset = load_custom("mine:data", with_vocabulary(some_bytes, some_bytes, 256))
    assert dataset.has_tokens
    assert dataset.classes == 256


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 5)])
def test_targets_of_tokens_have_any_shape(shape: tuple[int, ...]) -> None:
    targets = torch.ones(shape, dtype=torch.int64)
    assert load_custom("mine:data", returning(tokens, targets)).train.targets.shape == shape


def test_memory_mapped_tokens_are_not_copied(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(np.arange(101, dtype=np.uint16).tobytes())
    mapped = torch.from_file(str(file), shared=False, size=101, dtype=torch.uint16)
    inputs, targets = mapped[:100].view(10, 10), mapped[1:].view(10, 10)
    dataset = load_custom("mine:data", returning(inputs, targets))
    assert dataset.train.inputs.data_ptr() == mapped.data_ptr()
    assert dataset.train.targets.data_ptr() == mapped.data_ptr() + 2
    assert dataset.classes == 101


def failing() -> None:
    raise RuntimeError("no disk\nmore lines")


labels = torch.tensor([0, 1, 0, 1, 0, 1])
floats = torch.ones(6, 2)
with_nan = torch.tensor([[1.0, float("nan")]])

FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "raises": (failing, "the function failed: RuntimeError: no disk"),
    "returns nothing": (lambda: None, "must return ((train_x, train_y), (test_x, test_y))"),
    "returns one split": (lambda: (floats, labels), "must return ((train_x, train_y)"),
    "returns arrays": (returning(floats.numpy(), labels), "all tensors"),
    "flat images": (returning(images().flatten(1), labels), "got shape (6, 48)"),
    "truth values": (returning(floats.bool(), labels), "integer tokens or floats, got bool"),
    "fractional tokens": (with_vocabulary(floats, labels, 9), "integers below the vocabulary"),
    "large token": (
        with_vocabulary(tokens, tokens // 2, 300),
        "train_x has 300, outside the vocabulary of 300 tokens",
    ),
    "negative token": (returning(tokens - 300, labels), "train_x must not be negative, got -300"),
    "targets of fewer samples": (
        returning(tokens, tokens[:4]),
        "train_y must have the samples in its first dimension, as train_x has, got shape (4, 3)",
    ),
    "scalar target": (
        returning(tokens, torch.tensor(1)),
        "got shape () for inputs of shape (6, 3)",
    ),
    "no tokens": (returning(tokens[:, :0], labels), "train_x is empty"),
    "no targets": (returning(tokens, tokens[:, :0]), "train_y is empty"),
    "vocabulary": (with_vocabulary(tokens, labels, 0), "third value must be the size of"),
    "three splits": (lambda: ((tokens, labels),) * 3, "third value must be the size of"),
    "no feature": (returning(torch.ones(6), labels), "at least two dimensions"),
    "scalar label": (returning(floats, torch.tensor(1)), "train_y must have the samples in its"),
    "lengths": (returning(floats, labels[:4]), "got shape (4,) for inputs of shape (6, 2)"),
    "complex targets": (returning(floats, labels + 0j), "integers, floats or truth values"),
    "target that is not a number": (
        returning(floats[:1], with_nan),
        "train_y must be finite, but contains NaN or infinity",
    ),
    "empty": (returning(floats[:0], labels[:0]), "train_x is empty"),
    "empty test": (returning(floats, labels, floats[:0], labels[:0]), "test_x is empty"),
    "nan": (returning(with_nan, labels[:1]), "train_x must be finite"),
    "unequal splits": (
        returning(floats, labels, torch.ones(6, 3)),
        "the same sample shape",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_custom_data_is_a_one_line_error(fault: str) -> None:
    function, explanation = FAULTS[fault]
    with pytest.raises(DataError) as caught:
        load_custom("mine:data", function)
    assert explanation in str(caught.value)
    assert str(caught.value).startswith("data 'mine:data': ")
    assert "\n" not in str(caught.value)


TARGETS: dict[str, tuple[Callable[[], object], int, str]] = {
    "floats": (returning(floats, torch.ones(6, 4)), 4, "must have an integer dtype such as int64"),
    "one float": (returning(floats, labels.double()), 1, "int64, got float64"),
    "truth values": (returning(floats, torch.eye(6).bool()), 6, "int64, got bool"),
    "several labels": (returning(floats, torch.eye(6).long()), 6, "one label per sample"),
    "label per channel": (returning(images(), torch.ones(6, 3).long()), 3, "one label per sample"),
    "ignored labels": (returning(floats, labels - 1), 1, "must not be negative, got -1"),
    "floats for tokens": (returning(tokens, torch.ones(6, 900)), 301, "an integer dtype"),
    "large target": (
        with_vocabulary(tokens // 2, tokens, 300),
        300,
        "has 300, outside the vocabulary of 300 tokens",
    ),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_targets_that_are_not_classes_are_for_models_with_their_own_loss(kind: str) -> None:
    function, classes, problem = TARGETS[kind]
    dataset = load_custom("mine:data", function)
    assert dataset.classes == classes
    assert dataset.target_problem.startswith("data 'mine:data': train_y ")
    assert problem in dataset.target_problem


def test_classes_have_no_target_problem() -> None:
    for function in (returning(floats, labels), returning(tokens, tokens // 2)):
        assert not load_custom("mine:data", function).target_problem


def test_integer_inputs_have_any_shape() -> None:
    for inputs in (torch.arange(6), torch.arange(48).view(6, 2, 4)):
        dataset = load_custom("mine:data", returning(inputs, labels))
        assert dataset.has_tokens
        assert dataset.sample_shape == inputs.shape[1:]


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_own_data.py").write_text(
        "import torch\n"
        "def small():\n"
        "    x, y = torch.ones(30, 4), torch.arange(30) % 3\n"
        "    return (x, y), (x[:9], y[:9])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "users_own_data"


def test_custom_function_is_found_by_module_and_name(users_module: str) -> None:
    dataset = load_dataset(RunConfig(data=f"{users_module}:small", batch_size=10))
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (30, 9, 3)


def test_custom_dataset_is_truncated_to_requested_samples(users_module: str) -> None:
    config = RunConfig(
        data=f"{users_module}:small", batch_size=10, train_samples=12, test_samples=5
    )
    dataset = load_dataset(config)
    assert (len(dataset.train), len(dataset.test)) == (12, 5)


def test_missing_function_raises_user_code_error(users_module: str) -> None:
    with pytest.raises(UserCodeError, match="has no large"):
        load_dataset(RunConfig(data=f"{users_module}:large"))


def test_unknown_dataset_suggests_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="digits"):
        load_dataset(RunConfig(data="digit"))


def test_registered_dataset_is_truncated_to_requested_samples() -> None:
    dataset = load_dataset(RunConfig(train_samples=70, test_samples=20))
    assert (len(dataset.train), len(dataset.test)) == (70, 20)


def test_run_seed_does_not_change_the_synthetic_dataset() -> None:
    one, other = (
        load_dataset(RunConfig(train_samples=70, test_samples=1, seed=seed)) for seed in (0, 1)
    )
    assert torch.equal(one.train.inputs, other.train.inputs)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"batch_size": 31},
            "--batch-size: must be at most 30 for a training set of 30 samples, got 31",
        ),
        (
            {"batch_per_worker": 16, "nproc_per_node": 2},
            "--batch-per-worker: must be at most 15 for a training set of 30 samples, got 16",
        ),
        (
            {"batch_size": 2, "train_samples": 31},
            "--train-samples: must be at most 30, the size of users_own_data:small, got 31",
        ),
        (
            {"batch_size": 2, "test_samples": 10},
            "--test-samples: must be at most 9, the size of users_own_data:small, got 10",
        ),
        (
            {"batch_size": 2, "augment": ("flip",)},
            "--augment: requires uint8 images, but users_own_data:small does not hold them",
        ),
        (
            {"batch_size": 2, "context": 8},
            "--context: applies to text:PATH and stories, but samples of users_own_data:small have"
            " shape (4,)",
        ),
        (
            {"batch_size": 2, "text_test_fraction": 0.5},
            "--text-test-fraction: applies to text:PATH, not to users_own_data:small",
        ),
        (
            {"batch_size": 2, "eval_views": 2},
            "--eval-views: requires uint8 images, but users_own_data:small does not hold them",
        ),
    ],
)
def test_configuration_that_does_not_fit_the_dataset_is_rejected(
    users_module: str, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_dataset(RunConfig(data=f"{users_module}:small", **changes))
    assert caught.value.problems == (problem,)
