"""Loading of configured and user-defined datasets, with one-line errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import RunConfig
from paceline.data.loading import load_custom, load_dataset
from paceline.errors import ConfigError, DataError, UnknownNameError, UserCodeError


def images(samples: int = 6) -> torch.Tensor:
    return torch.arange(samples * 3 * 4 * 4).remainder(256).to(torch.uint8).view(samples, 3, 4, 4)


def returning(train_x: Any, train_y: Any, test_x: Any = None, test_y: Any = None) -> Any:
    """Return a dataset function; the test split defaults to the training split."""
    test = (train_x if test_x is None else test_x, train_y if test_y is None else test_y)
    return lambda: ((train_x, train_y), test)


def test_custom_images_are_normalized_by_their_own_statistics() -> None:
    dataset = load_custom("mine:data", returning(images(), torch.tensor([0, 1, 2, 0, 1, 2])))
    scaled = images().double() / 255
    assert dataset.classes == 3
    assert dataset.sample_shape == (3, 4, 4)
    assert dataset.transform is not None
    assert dataset.transform.mean == pytest.approx(scaled.mean((0, 2, 3)).tolist())
    assert dataset.transform.std == pytest.approx(scaled.std((0, 2, 3), correction=0).tolist())


def test_constant_images_get_a_nonzero_std() -> None:
    gray = torch.full((2, 1, 4, 4), 9, dtype=torch.uint8)
    transform = load_custom("mine:data", returning(gray, torch.tensor([0, 1]))).transform
    assert transform is not None
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
    "integers": (returning(floats.long(), labels), "uint8 images or floats, got int64"),
    "no feature": (returning(torch.ones(6), labels), "at least two dimensions"),
    "float labels": (returning(floats, labels.float()), "train_y must have an integer dtype"),
    "one-hot labels": (returning(floats, torch.eye(6).long()), "one label per sample"),
    "label per channel": (returning(images(), torch.ones(6, 3).long()), "one label per sample"),
    "scalar label": (returning(floats, torch.tensor(1)), "one label per sample"),
    "lengths": (returning(floats, labels[:4]), "train_x has 6 samples but train_y has 4 labels"),
    "empty": (returning(floats[:0], labels[:0]), "train_x is empty"),
    "empty test": (returning(floats, labels, floats[:0], labels[:0]), "test_x is empty"),
    "negative": (returning(floats, labels - 1), "train_y must not be negative, got -1"),
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
