"""What is guessed of a cell's time before any cell is done."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.config import from_mapping
from paceline.data.dataset import DatasetInfo
from paceline.models import MODELS, TOKEN_MODELS
from paceline.study import duration
from paceline.study.duration import DurationModel, samples_per_worker, speed

OUTLINE = DatasetInfo((1, 28, 28), 10, train_samples=1000, test_samples=300)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Ten epochs of 1,000, each with an evaluation of 300 that takes a third.
        ({"batch_size": 100, "epochs": 10}, 10 * 1000 + 10 * 100),
        ({"batch_size": 100, "epochs": 10, "nproc_per_node": 2}, (10 * 1000 + 10 * 100) / 2),
        ({"batch_size": 100, "iterations": 7, "eval_every": "never"}, 7 * 100 + 100),
        ({"batch_size": 100, "iterations": 7, "eval_every": 2}, 7 * 100 + 3 * 100),
        ({"batch_size": 50, "epochs": 2, "train_samples": 200, "test_samples": 60,
          "eval_every": "never"}, 2 * 200 + 20),
    ],
)  # fmt: skip
def test_samples_are_those_of_the_budget_and_a_third_of_those_evaluated(
    settings: dict[str, object], expected: float
) -> None:
    assert samples_per_worker(from_mapping(settings), OUTLINE) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 4.0),
        ({"threads": 1}, 1.0),
        ({"nproc_per_node": 8, "threads": 1}, 0.5),
        ({"nproc_per_node": 2}, 2.0),
        ({"cluster": "nodes=2,cpus=0.5", "threads": 1}, 0.5),
        ({"cluster": "nodes=8,cpus=1", "threads": 1}, 0.5),
    ],
)
def test_workers_share_the_cores_and_keep_to_quotas(
    settings: dict[str, object], expected: float
) -> None:
    assert speed(from_mapping(settings), cores=4) == expected


def test_an_estimate_covers_the_samples_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duration, "time_sample", lambda *key: 0.01)
    monkeypatch.setattr(duration, "cores_usable", lambda: 2)
    settings = {
        "model": "lenet",
        "batch_size": 100,
        "iterations": 10,
        "test_samples": 300,
        "eval_every": "never",
        "nproc_per_node": 2,
        "threads": 1,
        "device": "cpu",
    }
    # 550 samples of each worker.
    assert DurationModel().seconds_of(from_mapping(settings)) == pytest.approx(5.5)


@pytest.mark.parametrize("settings", [{"model": "mine:net"}, {"data": "mine:set"}])
def test_user_defined_models_and_data_have_no_estimate(settings: dict[str, object]) -> None:
    assert DurationModel().seconds_of(from_mapping({**settings, "device": "cpu"})) is None


@pytest.mark.parametrize("model", [entry.name for entry in MODELS])
def test_a_step_of_every_model_can_be_timed(model: str) -> None:
    outline = DatasetInfo((3, 32, 32), 10, train_samples=1, test_samples=1)
    if model in TOKEN_MODELS:
        outline = replace(outline, sample_shape=(16,), classes=256, has_tokens=True)
    assert 0 < duration.time_sample(from_mapping({"model": model}), outline) < math.inf
