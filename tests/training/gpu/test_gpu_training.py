"""Training on a GPU, with all that happens around captured steps; see also test_cuda_graph.py."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import from_mapping
from paceline.launch import launcher
from paceline.records import Result, RunFolder
from paceline.training.device import side_stream
from paceline.training.gpu.cuda_graph import CudaGraphBackend
from paceline.training.step import TrainStep
from tests.training.test_resume import PowerCut, power_cut_at, result_of

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {
    "device": "cuda",
    "data": "digits",
    "train_samples": 200,
    "test_samples": 40,
    # The last batch of an epoch is smaller.
    "batch_size": 32,
    "epochs": 4,
    "augment": "crop,flip,cutout",
    "schedule": "cosine",
    "precision": "fp32",
    "channels_last": "off",
    "sample_seconds": 0,
    "tensorboard": False,
    "eval_every": "never",
}

MODELS = '''
from math import prod

from torch import nn


class Dropping(nn.Module):
    """Draws random numbers on the GPU."""

    def __init__(self, sample_shape, classes):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(prod(sample_shape), 64), nn.BatchNorm1d(64), nn.ReLU(),
            nn.Dropout(0.5), nn.Linear(64, classes),
        )

    def forward(self, inputs):
        return self.layers(inputs)


class Waiting(Dropping):
    """Waits for the GPU, so it cannot be captured."""

    def forward(self, inputs):
        outputs = self.layers(inputs)
        assert float(outputs.detach().abs().max()) < 1e9
        return outputs


class WaitingInEvaluation(Dropping):
    def forward(self, inputs):
        outputs = self.layers(inputs)
        assert self.training or float(outputs.abs().max()) < 1e9
        return outputs


class Counting(Dropping):
    """Computes something else in every third pass."""

    def __init__(self, sample_shape, classes):
        super().__init__(sample_shape, classes)
        self.passes = 0

    def forward(self, inputs):
        self.passes += self.training
        return self.layers(inputs) * (2.0 if self.passes % 3 == 0 else 1.0)
'''


@pytest.fixture(autouse=True)
def user_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))


def train(tmp_path: Path, name: str, *, status: str = "finished", **settings: Any) -> Result:
    config = from_mapping({**SMALL, "out": str(tmp_path), "name": name, **settings})
    # As in a new process.
    torch.manual_seed(0)
    result = result_of(launcher.train(config, quiet=True))
    assert result["status"] == status, result["cause"]
    return result


def captured_and_eager(tmp_path: Path, **settings: Any) -> tuple[Result, Result]:
    captured = train(tmp_path, "captured", **settings)
    eager = train(tmp_path, "eager", **settings, cuda_graph="off")
    return captured, eager


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "resnet18", "channels_last": "on", "precision": "bf16", "epochs": 2},
        {"model": "lenet", "momentum": 0, "clip_norm": 0.1},
        {"model": "lenet", "accumulate": 3, "nesterov": True, "weight_decay": 1e-3},
        {"model": "lenet", "precision": "fp16", "clip_norm": 1.0, "optimizer": "adam", "lr": 1e-3},
        {"model": "gpu_models:Dropping", "batch_size": 16, "schedule": "one_cycle"},
    ],
    ids=str,
)
def test_captured_run_equals_eager_run(settings: dict[str, Any], tmp_path: Path) -> None:
    captured, eager = captured_and_eager(tmp_path, **settings)
    assert captured["workers"][0]["cuda_graph"]["captured"]
    assert not eager["workers"][0]["cuda_graph"]["captured"]
    assert captured["weights_sha256"] == eager["weights_sha256"]
    assert captured["final"] == eager["final"]


@pytest.mark.parametrize("model", ["Waiting", "Counting"])
def test_model_that_cannot_be_captured_trains_as_without_capture(
    model: str, tmp_path: Path
) -> None:
    # Evaluation is captured even so.
    often: dict[str, Any] = {"eval_every": 5, "eval_batch_size": 10}
    captured, eager = captured_and_eager(tmp_path, model=f"gpu_models:{model}", **often)
    report = captured["workers"][0]["cuda_graph"]
    assert not report["captured"]
    assert any(report["reason"] in text for text in captured["warnings"])
    assert captured["weights_sha256"] == eager["weights_sha256"]


def test_evaluation_that_cannot_be_captured_runs_eagerly_with_a_warning(tmp_path: Path) -> None:
    settings = {"model": "gpu_models:WaitingInEvaluation", "eval_every": "epoch"}
    captured, eager = captured_and_eager(tmp_path, **settings)
    assert captured["workers"][0]["cuda_graph"]["captured"]
    assert any("no CUDA graph of the evaluation" in text for text in captured["warnings"])
    assert captured["weights_sha256"] == eager["weights_sha256"]
    assert captured["final"] == eager["final"]


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "gpu_models:Dropping", "checkpoint_mode": "background"},
        {"model": "lenet", "optimizer": "adam", "lr": 1e-3, "precision": "bf16"},
        {"model": "lenet", "precision": "fp16", "accumulate": 2},
    ],
    ids=str,
)
def test_killed_and_resumed_captured_run_is_bit_identical(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tmp_path, "whole", **settings)
    with pytest.raises(PowerCut), power_cut_at(monkeypatch, 18):
        train(tmp_path, "cut", **settings, checkpoint_every=5)
    folder = RunFolder.open(tmp_path / "cut")
    resumed = result_of(launcher.resume(str(folder.path), {}, quiet=True))
    assert resumed["workers"][0]["cuda_graph"]["captured"]
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["final"]["test_loss"] == whole["final"]["test_loss"]


def test_failed_capture_leaves_memory_and_random_generators_as_they_were() -> None:
    def function() -> torch.Tensor:
        values = torch.rand(2**24, device="cuda")
        return values * float(values.sum())

    with side_stream(torch.device("cuda")):
        function()
        torch.cuda.empty_cache()
        reserved_bytes = torch.cuda.memory_reserved()
        backend = CudaGraphBackend()
        for _ in range(2):
            torch.cuda.manual_seed(5)
            with pytest.raises(RuntimeError, match="captur"):
                backend.capture(function)
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() < reserved_bytes + 2**24
            after_failure = torch.rand(3, device="cuda").tolist()
            torch.cuda.manual_seed(5)
            assert torch.rand(3, device="cuda").tolist() == after_failure
        graph, output = backend.capture(lambda: torch.rand(3, device="cuda") + 1)
        graph.replay()
        assert 1 <= float(output.min()) <= float(output.max()) <= 2


def test_checkpoints_and_evaluations_between_captured_steps_change_nothing(tmp_path: Path) -> None:
    plain = train(tmp_path, "plain", model="gpu_models:Dropping")
    busy = train(
        tmp_path,
        "busy",
        model="gpu_models:Dropping",
        checkpoint_every=3,
        checkpoint_mode="background",
        eval_every=2,
        trace=5,
    )
    assert busy["weights_sha256"] == plain["weights_sha256"]


def test_phases_of_captured_steps_add_up_to_the_wall_time(tmp_path: Path) -> None:
    result = train(tmp_path, "run", model="lenet", epochs=40)
    (worker,) = result["workers"]
    assert worker["cuda_graph"]["captured"]
    assert all(seconds >= 0 for seconds in worker["phases"].values())
    assert sum(worker["phases"].values()) == pytest.approx(worker["wall_seconds"], rel=0.01)
    after = worker["after_first"]
    assert all(seconds >= 0 for seconds in after["phases"].values())
    for phase in ("input", "forward", "backward", "update"):
        assert after["phases"][phase] > 0, phase


def test_captured_run_stops_on_a_signal_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tmp_path, "whole", model="gpu_models:Dropping")
    original = TrainStep.__call__

    def step(self: TrainStep, number: int, shard: int) -> Any:
        if number == 12:
            signal.raise_signal(signal.SIGTERM)
        return original(self, number, shard)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", step)
        stopped = train(
            tmp_path, "cut", status="stopped", model="gpu_models:Dropping", checkpoint_every=100
        )
    assert stopped["iterations"] == 13
    resumed = result_of(launcher.resume(str(tmp_path / "cut"), {}, quiet=True))
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_diverging_captured_run_is_reported(tmp_path: Path) -> None:
    steep: dict[str, Any] = {"model": "lenet", "lr": 1e9, "schedule": "constant", "epochs": 200}
    result = train(tmp_path, "run", status="diverged", **steep)
    assert "the loss became" in str(result["cause"])


def test_measured_format_is_recorded_and_kept_by_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto: dict[str, Any] = {
        "model": "cnn",
        "precision": "auto",
        "channels_last": "auto",
        "checkpoint_every": 5,
    }
    with pytest.raises(PowerCut), power_cut_at(monkeypatch, 18):
        train(tmp_path, "cut", **auto)
    resumed = result_of(launcher.resume(str(tmp_path / "cut"), {}, quiet=True))
    numerics = resumed["workers"][0]["numerics"]
    assert numerics["reason"] == "checkpoint"
    given = {
        "precision": numerics["precision"],
        "channels_last": "on" if numerics["channels_last"] else "off",
    }
    whole = train(tmp_path, "whole", **{**auto, **given})
    assert resumed["weights_sha256"] == whole["weights_sha256"]
