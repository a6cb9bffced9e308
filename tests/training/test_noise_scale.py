"""The noise scale of real runs: against per-sample gradients, in records, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from paceline.config import from_mapping
from paceline.data.loading import load_dataset
from paceline.data.pipeline import EvaluationPipeline
from paceline.launch import launcher
from paceline.measure.noise_scale import estimate, read_noise_samples
from paceline.models.build import build_model
from paceline.records import Result, RunFolder
from paceline.training.checkpoint import newest_checkpoint

SETTINGS: dict[str, Any] = {
    "data": "digits",
    "train_samples": 1024,
    "test_samples": 8,
    "batch_size": 512,
    "accumulate": 8,
    "optimizer": "adam",
    "eval_every": "never",
    "threads": 1,
    "sample_seconds": 0,
    "tensorboard": False,
}
FROZEN = "1e-30"
"""A learning rate at which the weights stay as they are, because updates are rounded away."""


def train(out: Path, **settings: Any) -> tuple[RunFolder, Result]:
    config = from_mapping({**SETTINGS, "out": str(out), **settings})
    folder, result, code = launcher.train(config, quiet=True)
    assert code == 0
    assert result is not None
    return folder, result


def exact_noise_scale(folder: RunFolder) -> tuple[float, float]:
    """Variance of the gradient of a sample and squared norm of the mean, with the final weights."""
    config = folder.read_config()
    dataset = load_dataset(config)
    model = build_model(config.model, dataset.sample_shape, dataset.classes, config.seed)
    checkpoint = newest_checkpoint(folder.checkpoints)
    assert checkpoint is not None
    model.load_state_dict(checkpoint.state["model"])
    count = len(dataset.train)
    inputs, targets = EvaluationPipeline(dataset.train, dataset.transform, count).gather(count)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], one: torch.Tensor, target: torch.Tensor) -> Any:
        return F.cross_entropy(functional_call(model, values, (one[None],)), target[None])

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=128)(weights, inputs, targets)
    flat = torch.cat([each.flatten(1) for each in per_sample.values()], 1)
    variance = float(flat.var(0, unbiased=True).sum())
    # The mean over the training set has noise of its own, of variance / count.
    return variance, float(flat.mean(0).square().sum()) - variance / count


@pytest.mark.parametrize(
    ("model", "rates"),
    [("softmax", (f"{FROZEN}:30",)), ("lenet", ("3e-3:15", f"{FROZEN}:30"))],
)
def test_measured_noise_scale_is_within_20_percent_of_the_exact_one(
    tmp_path: Path, model: str, rates: tuple[str, ...]
) -> None:
    epochs = sum(int(each.partition(":")[2]) for each in rates)
    folder, _ = train(
        tmp_path,
        model=model,
        schedule="steps",
        lr_steps=list(rates),
        epochs=epochs,
        noise_every=1,
        checkpoint_every=2 * epochs,
    )
    variance, square = exact_noise_scale(folder)
    samples = read_noise_samples(folder.events_file(0))
    assert len(samples) == 2 * epochs
    found = estimate(samples[-60:], decay=1.0)
    assert found is not None
    assert found.variance == pytest.approx(variance, rel=0.1)
    assert found.value == pytest.approx(variance / square, rel=0.2)
    assert found.value is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high


def test_noise_scale_is_in_events_scalars_and_result(tmp_path: Path) -> None:
    folder, result = train(
        tmp_path, model="softmax", lr=0.01, iterations=40, noise_every=2, tensorboard=True
    )
    noise = result["workers"][0]["noise_scale"]
    samples = read_noise_samples(folder.events_file(0))
    assert [each.iteration for each in samples] == list(range(1, 40, 2))
    found = estimate(samples)
    assert found is not None
    assert noise == {"every": 2, "reason": None, **found.to_dict()}
    scalars = EventAccumulator(str(folder.tensorboard))
    scalars.Reload()
    last = scalars.Scalars("train/noise_scale")[-1]
    assert (last.step, last.value) == (40, pytest.approx(noise["value"], rel=1e-6))


def test_resumed_run_keeps_the_measurements_before_its_checkpoint(tmp_path: Path) -> None:
    task: dict[str, Any] = {"model": "softmax", "lr": 0.01, "noise_every": 2}
    _, whole = train(tmp_path, **task, iterations=20)
    folder, _ = train(tmp_path, **task, iterations=10, checkpoint_every=10)
    resumed = launcher.resume(str(folder.path), {"iterations": "20"}, quiet=True).result
    assert resumed is not None
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["workers"][0]["noise_scale"] == whole["workers"][0]["noise_scale"]


def test_a_setting_without_effect_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = from_mapping(
        {**SETTINGS, "out": str(tmp_path), "accumulate": 1, "iterations": 1, "noise_every": 5}
    )
    assert launcher.train(config).exit_code == 0
    assert (
        "gradient noise scale not measured: one worker without gradient accumulation has no smaller"
        " batches to compare with"
    ) in " ".join(capsys.readouterr().out.split())
