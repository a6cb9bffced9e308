"""Runs with a loss, targets and metrics of the user: results, records and one-line errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config import from_mapping
from paceline.errors import UsageError
from paceline.launch import launcher
from paceline.records import Result, RunFolder

Samples = tuple[Tensor, Tensor]

SMALL: dict[str, Any] = {
    "batch_size": 16,
    "epochs": 4,
    "optimizer": "adam",
    "threads": 1,
    "sample_seconds": 0,
    "tensorboard": False,
}


def split(inputs: Tensor, targets: Tensor) -> tuple[Samples, Samples]:
    return (inputs[:160], targets[:160]), (inputs[160:], targets[160:])


def points() -> Tensor:
    return torch.randn(200, 4, generator=torch.Generator().manual_seed(0))


def heights() -> tuple[Samples, Samples]:
    """One float per sample."""
    return split(points(), points().sum(1).double())


def tags() -> tuple[Samples, Samples]:
    """Several labels per sample, as truth values."""
    return split(points(), points()[:, :3] > 0)


def numbers() -> tuple[Samples, Samples]:
    """A token per sample, without a length, and its digit; some are not counted."""
    tokens = torch.arange(200) % 50
    return split(tokens, torch.where(tokens == 7, -100, tokens % 10))


class Linear(nn.Module):
    def __init__(self, sample_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(sample_shape[0], classes)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs


class Height(Linear):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert targets.dtype == torch.float32
        return F.mse_loss(outputs[:, 0], targets)


class Tags(Linear):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert targets.dtype == torch.bool
        return F.binary_cross_entropy_with_logits(outputs, targets.float())


class Digits(nn.Module):
    """Returns its loss, as nanoGPT does."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.scores = nn.Embedding(classes, 10)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.scores(tokens)
        return logits, None if targets is None else F.cross_entropy(logits, targets)


def mean_absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs().mean()


def train(out: Path, model: str, data: str, **settings: Any) -> tuple[RunFolder, Result]:
    names = {"model": f"{__name__}:{model}", "data": f"{__name__}:{data}"}
    config = from_mapping({**SMALL, **names, "out": str(out), **settings})
    folder, result, _ = launcher.train(config, quiet=True)
    assert result is not None
    assert result["status"] == "finished", result["cause"]
    return folder, result


@pytest.mark.parametrize(
    ("model", "data", "start"),
    [("Height", "heights", 1.0), ("Tags", "tags", 0.5), ("Digits", "numbers", 2.0)],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_own_loss_is_minimized_for_targets_of_any_kind(
    tmp_path: Path, model: str, data: str, start: float, precision: str
) -> None:
    _, result = train(tmp_path, model, data, lr=0.1, precision=precision, accumulate=2)
    losses = [entry["test_loss"] for entry in result["history"]]
    assert losses[-1] < min(start, losses[0])
    assert result["metrics"] == {}
    assert result["final"]["test_accuracy"] is None
    assert result["final"]["train_loss"] is not None


def test_test_loss_and_own_metric_do_not_depend_on_the_evaluation_batch(tmp_path: Path) -> None:
    settings = {"epochs": 1, "metrics": f"{__name__}:mean_absolute_error"}
    whole, parts = (
        train(tmp_path, "Height", "heights", eval_batch_size=size, **settings)[1]
        for size in (40, 7)
    )
    assert parts["final"]["test_loss"] == pytest.approx(whole["final"]["test_loss"], rel=1e-6)
    assert parts["metrics"] == pytest.approx(whole["metrics"], rel=1e-6)


def test_records_and_tensorboard_have_the_metrics_that_are_asked_for(tmp_path: Path) -> None:
    names = f"accuracy,perplexity,{__name__}:last_logit"
    folder, result = train(
        tmp_path, "Digits", "numbers", metrics=names, tensorboard=True, target_accuracy=0.4, lr=0.2
    )
    assert list(result["metrics"]) == ["accuracy", "perplexity", "last_logit"]
    assert result["metrics"]["perplexity"] == pytest.approx(math.exp(result["final"]["test_loss"]))
    assert result["final"]["test_accuracy"] == result["metrics"]["accuracy"] > 0.4
    assert result["seconds_to_target"] is not None
    accumulator = EventAccumulator(str(folder.tensorboard))
    accumulator.Reload()
    for name, value in result["metrics"].items():
        assert accumulator.Scalars(f"test/{name}")[-1].value == pytest.approx(value, rel=1e-6)


def last_logit(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, -1].mean()


def test_metrics_may_change_on_resume(tmp_path: Path) -> None:
    folder, first = train(tmp_path, "Height", "heights", checkpoint_every="epoch", epochs=1)
    changes = {"epochs": 2, "metrics": f"{__name__}:mean_absolute_error"}
    result = launcher.resume(str(folder.path), changes, quiet=True).result
    assert result is not None
    assert first["metrics"] == {}
    assert list(result["metrics"]) == ["mean_absolute_error"]


class PerSample(Height):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).square()


class WrongShape(Height):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets)


def fails(outputs: Tensor, targets: Tensor) -> Tensor:
    raise ValueError("no such class\nand more")


@pytest.mark.parametrize(
    ("model", "data", "settings", "problem"),
    [
        ("PerSample", "heights", {}, "got a loss of shape (16,) and float32, not one number"),
        ("WrongShape", "heights", {}, "the loss failed for outputs of shape (16, 1) and float32 and"
         " targets of shape (16,) and float32: ValueError: Target size"),
        ("Linear", "heights", {}, "train_y must have an integer dtype such as int64, got float64;"
         " other targets need a model with its loss"),
        ("Height", "heights", {"label_smoothing": 0.1}, "--label-smoothing: the model has its own"),
        ("Height", "heights", {"metrics": "acuracy"}, "did you mean accuracy?"),
        ("Height", "heights", {"metrics": "absent:f1"}, "metric 'absent:f1': cannot import absent"),
        ("Height", "heights", {"metrics": "accuracy"}, "--metrics accuracy: the metric failed:"
         " ValueError: it needs class indices as targets, got torch.float32"),
        ("Height", "heights", {"metrics": f"{__name__}:fails"},
         "the metric failed: ValueError: no such class and more (test_own_tasks.py:"),
        ("Height", "heights", {"target_accuracy": 0.5}, "--target-accuracy: the model has its own"),
    ],
)  # fmt: skip
def test_invalid_task_is_a_one_line_error(
    tmp_path: Path, model: str, data: str, settings: dict[str, Any], problem: str
) -> None:
    names = {"model": f"{__name__}:{model}", "data": f"{__name__}:{data}"}
    config = from_mapping({**SMALL, **names, "out": str(tmp_path), **settings})
    with pytest.raises(UsageError) as caught:
        launcher.train(config, quiet=True)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir()), "a rejected run leaves no files"
