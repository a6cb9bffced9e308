"""End-to-end runs of one worker: results, records and numerical equivalence."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F

from paceline.config import RunConfig, from_mapping
from paceline.data.dataset import Dataset
from paceline.data.loading import load_dataset
from paceline.data.pipeline import InputPipeline
from paceline.data.sampling import GlobalBatchSampler
from paceline.errors import ConfigError
from paceline.launch import launcher
from paceline.measure.startup import STARTUP_PARTS
from paceline.models.build import DataDependentModel, build_model
from paceline.records import PHASES, Result, RunFolder, read_lines
from paceline.training import run_logger, trainer
from paceline.training.rank_report import weights_sha256

SMALL: dict[str, Any] = {
    "train_samples": 200,
    "test_samples": 100,
    "batch_size": 32,
    "threads": 1,
    "sample_seconds": 0,
    "tensorboard": False,
}


def train(out: Path, **settings: Any) -> tuple[RunFolder, Result]:
    config = from_mapping({**SMALL, "out": str(out), **settings})
    folder, result, code = launcher.train(config, quiet=True)
    assert result is not None
    assert (code == 0) == (result["status"] == "finished")
    return folder, result


def test_result_has_every_documented_key(tmp_path: Path) -> None:
    folder, result = train(tmp_path, epochs=1, sample_seconds=0.1)
    assert set(result) >= {
        "schema", "id", "status", "cause", "kind", "config", "software", "hardware",
        "wall_seconds", "iterations", "samples", "weights_sha256", "final", "seconds_to_target",
        "history", "workers", "nodes", "checkpoints", "measurement_overhead",
    }  # fmt: skip
    (worker,), (node,) = result["workers"], result["nodes"]
    assert set(worker) >= {
        "rank", "node", "samples", "wall_seconds", "iteration_seconds", "phases",
        "hidden_exchange_seconds", "after_first", "traffic", "memory", "tensor_bytes",
        "tensor_shapes",
    }  # fmt: skip
    # A LeNet: weight and bias of two convolutions and two linear layers.
    assert len(worker["tensor_bytes"]) == 8
    assert worker["tensor_bytes"][-1] == 10 * 4
    assert [4 * math.prod(each) for each in worker["tensor_shapes"]] == worker["tensor_bytes"]
    assert worker["tensor_shapes"][-1] == [10]
    assert set(worker["iteration_seconds"]) == {"first", "mean", "median", "p95"}
    assert tuple(worker["phases"]) == PHASES
    assert set(node) >= {
        "node", "cpu_percent_mean", "rss_bytes_mean", "rss_bytes_peak", "pss_bytes_peak",
        "network_bytes_sent", "network_bytes_received", "gpus",
    }  # fmt: skip
    assert set(result["final"]) == {"train_loss", "test_loss", "test_accuracy"}
    assert set(result["checkpoints"]) >= {"count", "bytes", "blocked_seconds"}
    assert folder.read_result() == result


def test_an_epoch_covers_every_sample_once(tmp_path: Path) -> None:
    _, result = train(tmp_path, epochs=2)
    assert result["iterations"] == 2 * math.ceil(200 / 32)
    assert result["samples"] == 2 * 200


def test_phases_add_up_to_the_wall_time(tmp_path: Path) -> None:
    _, result = train(tmp_path, epochs=1, checkpoint_every=3, accumulate=2)
    (worker,) = result["workers"]
    assert sum(worker["phases"].values()) == pytest.approx(worker["wall_seconds"], rel=0.01)
    for phase in ("input", "forward", "backward", "update", "evaluate", "checkpoint", "other"):
        assert worker["phases"][phase] > 0, phase


def test_startup_time_is_split_and_counts_as_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_load(config: RunConfig) -> Dataset:
        time.sleep(0.2)
        return load_dataset(config)

    def slow_build(*arguments: Any, **options: Any) -> nn.Module:
        time.sleep(0.1)
        return build_model(*arguments, **options)

    monkeypatch.setattr(trainer, "load_dataset", slow_load)
    monkeypatch.setattr(trainer, "build_model", slow_build)
    _, result = train(tmp_path, iterations=2)
    (worker,) = result["workers"]
    startup = worker["startup_seconds"]
    assert set(startup) == set(STARTUP_PARTS)
    assert startup["data"] >= 0.2
    assert startup["model"] >= 0.1
    assert startup["rendezvous"] == 0
    assert startup["device"] + startup["data"] + startup["model"] <= worker["phases"]["other"]
    assert sum(worker["phases"].values()) == pytest.approx(worker["wall_seconds"], rel=0.01)


def test_tensorboard_has_step_time_throughput_and_phase_fractions(tmp_path: Path) -> None:
    folder, _ = train(tmp_path, iterations=6, tensorboard=True)
    accumulator = EventAccumulator(str(folder.tensorboard), size_guidance={"scalars": 0})
    accumulator.Reload()
    scalars = {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}
    assert scalars["train/step_seconds"][-1].step == 6
    for step, rate in zip(
        scalars["train/step_seconds"], scalars["train/samples_per_second"], strict=True
    ):
        assert step.value * rate.value == pytest.approx(32, rel=1e-3)
    phases = {tag: points for tag, points in scalars.items() if tag.startswith("phases/")}
    assert {"phases/input", "phases/forward", "phases/backward", "phases/update"} <= set(phases)
    last = [points[-1].value for points in phases.values() if points[-1].step == 6]
    assert sum(last) == pytest.approx(1.0, abs=1e-4)


def test_phases_after_the_first_iteration_are_within_its_time(tmp_path: Path) -> None:
    _, result = train(tmp_path, epochs=1, checkpoint_every=3, eval_every=2)
    (worker,) = result["workers"]
    later = worker["after_first"]
    assert later["iterations"] == result["iterations"] - 1
    timed = worker["iteration_seconds"]["mean"] * later["iterations"]
    assert 0 < sum(later["phases"].values()) <= timed * (1 + 1e-6)
    for phase, seconds in later["phases"].items():
        assert seconds <= worker["phases"][phase], phase


def plain_training(settings: dict[str, Any], steps: int) -> str:
    """Return the weight hash of a plain PyTorch loop, as an independent reference."""
    config = from_mapping(settings)
    data = load_dataset(config)
    order = GlobalBatchSampler(len(data.train), config.global_batch_size, config.seed)
    inputs = InputPipeline(data.train, data.transform, order, augment=(), seed=config.seed)
    model = build_model(config.model, data.sample_shape, data.classes, config.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9, fused=True)
    for step in range(steps):
        x, y = inputs.batch(*divmod(step, order.batches_per_epoch))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights_sha256(model.state_dict())


def test_training_matches_a_plain_pytorch_loop(tmp_path: Path) -> None:
    settings = {**SMALL, "iterations": 10, "lr": 0.05}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = plain_training(settings, 10)
    finally:
        torch.set_num_threads(threads)
    _, result = train(tmp_path, **settings)
    assert result["weights_sha256"] == expected


def test_same_configuration_gives_the_same_weights(tmp_path: Path) -> None:
    settings = {"epochs": 1, "augment": "crop,flip,cutout"}
    hashes = {train(tmp_path, seed=3, **settings)[1]["weights_sha256"] for _ in range(2)}
    hashes.add(train(tmp_path, seed=4, **settings)[1]["weights_sha256"])
    assert len(hashes) == 2


def losses(folder: RunFolder) -> list[float]:
    blocks = [e for e in read_lines(folder.events_file(0)) if e["event"] == "iterations"]
    return [loss for block in blocks for loss in block["loss"]]


def test_a_model_is_initialized_from_the_first_normalized_training_samples() -> None:
    settings = {"model": "whitened_cnn", "model_options": {"width": "0.1"}, "normalize": "image"}
    config = from_mapping({**SMALL, **settings})
    prepared = trainer.prepare(config)
    dataset = load_dataset(config)
    shape, classes = dataset.sample_shape, dataset.classes
    expected = build_model("whitened_cnn", shape, classes, 0, options=config.model_options)
    order = GlobalBatchSampler(200, 200, seed=0)
    inputs, _ = InputPipeline(dataset.train, dataset.transform, order).batch(0, 0)
    in_order = torch.empty_like(inputs)
    in_order[order.permutation(0)] = inputs
    assert isinstance(expected, DataDependentModel)
    expected.initialize_from(in_order)
    assert weights_sha256(prepared.model.state_dict()) == weights_sha256(expected.state_dict())


def test_views_change_the_evaluation_but_not_the_training(tmp_path: Path) -> None:
    runs = [train(tmp_path / str(views), epochs=1, eval_views=views)[1] for views in (1, 6)]
    assert runs[0]["weights_sha256"] == runs[1]["weights_sha256"]
    assert runs[0]["final"]["test_loss"] != runs[1]["final"]["test_loss"]


def test_gradient_accumulation_gives_the_losses_of_the_full_batch(tmp_path: Path) -> None:
    whole, _ = train(tmp_path, iterations=12)
    parts, _ = train(tmp_path, iterations=12, accumulate=5)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)


def test_without_reshuffle_every_epoch_has_the_same_order(tmp_path: Path) -> None:
    """At a rate too small to learn, equal batches give equal losses: the order is laid bare."""
    settings = {"epochs": 2, "lr": 1e-12, "momentum": 0}
    repeated = losses(train(tmp_path, reshuffle=False, **settings)[0])
    fresh = losses(train(tmp_path, **settings)[0])
    assert repeated[7:] == pytest.approx(repeated[:7], rel=1e-5)
    assert fresh[7:] != pytest.approx(fresh[:7], rel=1e-3)


def test_target_accuracy_stops_the_run_and_its_time_excludes_evaluation(tmp_path: Path) -> None:
    _, result = train(tmp_path, epochs=50, eval_every=2, target_accuracy=0.01)
    assert result["status"] == "finished"
    assert result["iterations"] == 2
    (entry,) = result["history"]
    (worker,) = result["workers"]
    assert result["seconds_to_target"] == entry["seconds"]
    spent = worker["wall_seconds"] - worker["phases"]["evaluate"]
    assert 0 < result["seconds_to_target"] < spent


def test_target_loss_stops_the_run_at_the_first_evaluation_that_reaches_it(tmp_path: Path) -> None:
    settings = {"eval_every": 2, "lr": 0.005, "model": "softmax", "data": "plain_digits"}
    _, whole = train(tmp_path, iterations=8, **settings)
    losses = [entry["test_loss"] for entry in whole["history"]]
    assert losses[2] < min(losses[:2])
    _, result = train(tmp_path, epochs=50, target_loss=losses[2], **settings)
    assert result["status"] == "finished"
    assert result["iterations"] == 6
    assert result["seconds_to_target"] == result["history"][-1]["seconds"]


def test_records_and_tensorboard_have_the_metrics_of_text(tmp_path: Path) -> None:
    folder, result = train(
        tmp_path, data="stories", context=16, model="tests.support.user_code:NextToken",
        iterations=4, eval_every=2, tensorboard=True,
    )  # fmt: skip
    final = result["final"]
    assert result["metrics"] == {
        "accuracy": final["test_accuracy"],
        "perplexity": pytest.approx(math.exp(final["test_loss"])),
        "bits_per_byte": pytest.approx(final["test_loss"] / math.log(2)),
    }
    assert [set(entry["metrics"]) for entry in result["history"]] == [set(result["metrics"])] * 2
    accumulator = EventAccumulator(str(folder.tensorboard))
    accumulator.Reload()
    for name, value in result["metrics"].items():
        assert accumulator.Scalars(f"test/{name}")[-1].value == pytest.approx(value, rel=1e-6)


def test_images_have_only_accuracy_among_the_metrics(tmp_path: Path) -> None:
    _, result = train(tmp_path, iterations=1)
    assert result["metrics"] == {"accuracy": result["final"]["test_accuracy"]}


def test_evaluation_runs_at_its_interval_and_at_the_end(tmp_path: Path) -> None:
    _, result = train(tmp_path, iterations=11, eval_every=4)
    assert [entry["iteration"] for entry in result["history"]] == [4, 8, 11]
    _, never = train(tmp_path, iterations=11, eval_every="never")
    assert [entry["iteration"] for entry in never["history"]] == [11]


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adam", "lr": 1e-3},
        {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        {"nesterov": True, "weight_decay": 1e-3},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"channels_last": True},
        {"label_smoothing": 0.1},
        {"clip_norm": 0.5, "precision": "fp16"},
        {"schedule": "one_cycle", "warmup_epochs": 0.5},
    ],
    ids=str,
)
def test_every_optimizer_and_schedule_learns(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Two hundred digits are learnt by heart: the loss falls well below that of guessing."""
    folder, result = train(
        tmp_path, **{"epochs": 20, "lr": 0.02, "eval_every": "never", **settings}
    )
    assert result["status"] == "finished"
    curve = losses(folder)
    assert sum(curve[-7:]) / 7 < 0.8 * sum(curve[:7]) / 7


def test_clipping_bounds_an_update(tmp_path: Path) -> None:
    """Plain SGD moves the weights by at most rate times norm: here 1 x 0.01, in one step."""
    config = from_mapping({**SMALL, "iterations": 1, "momentum": 0, "lr": 1.0})
    data = load_dataset(config)
    before = build_model("lenet", data.sample_shape, data.classes, config.seed).state_dict()
    folder, _ = train(
        tmp_path, iterations=1, momentum=0, lr=1.0, clip_norm=0.01, checkpoint_every=1
    )
    (file,) = folder.checkpoints.glob("*.pt")
    after = torch.load(file, weights_only=True)["model"]
    moved = math.sqrt(sum(float((after[name] - before[name]).square().sum()) for name in before))
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_diverged_run_has_this_status_and_keeps_its_records(tmp_path: Path) -> None:
    folder, result = train(tmp_path, epochs=20, lr=1e8)
    assert result["status"] == "diverged"
    assert "loss became" in result["cause"]
    assert folder.read_result() == result
    assert list(read_lines(folder.events_file(0)))[-1]["status"] == "diverged"


def test_the_diverged_iteration_counts_in_all_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block is written after every iteration, so the loss is found there and not at the end."""
    monkeypatch.setattr(run_logger, "BLOCK_SECONDS", 0.0)
    folder, result = train(tmp_path, epochs=20, lr=1e8)
    (worker,) = result["workers"]
    timed = [
        seconds
        for event in read_lines(folder.events_file(0))
        if event["event"] == "iterations"
        for seconds in event["seconds"]
    ]
    assert result["status"] == "diverged"
    assert result["iterations"] == len(timed) == worker["after_first"]["iterations"] + 1
    assert worker["iteration_seconds"]["mean"] == pytest.approx(
        sum(timed[1:]) / (len(timed) - 1), rel=1e-3
    )


def test_error_in_a_model_fails_the_run_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_model_a.py").write_text(
        "from torch import nn\n"
        "class Broken(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(2, 2)\n"
        "    def forward(self, x):\n"
        "        raise RuntimeError('the dog ate it')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    folder, result = train(tmp_path, model="broken_model_a:Broken", epochs=1)
    assert result["status"] == "failed"
    assert "the dog ate it" in result["cause"]
    assert "broken_model_a.py" in (folder.path / "traceback.txt").read_text()


def test_custom_data_and_model_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parts_a.py").write_text(
        "import torch\n"
        "def data():\n"
        "    x = torch.randn(96, 5, generator=torch.Generator().manual_seed(1))\n"
        "    y = (x.sum(1) > 0).long()\n"
        "    return (x[:64], y[:64]), (x[64:], y[64:])\n"
        "def model(sample_shape, classes):\n"
        "    return torch.nn.Linear(sample_shape[0], classes)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    _, result = train(
        tmp_path, data="own_parts_a:data", model="own_parts_a:model", epochs=60, lr=0.5,
        train_samples=None, test_samples=None, eval_every="never",
    )  # fmt: skip
    assert result["final"]["test_accuracy"] > 0.8


def test_sequences_with_a_label_per_position_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_sequences_a.py").write_text(
        "import torch\n"
        "def data():\n"
        "    x = torch.randn(96, 3, 5, generator=torch.Generator().manual_seed(1))\n"
        "    y = (x.sum(2) > 0).to(torch.uint8)\n"
        "    return (x[:64], y[:64]), (x[64:], y[64:])\n"
        "def model(sample_shape, classes):\n"
        "    return torch.nn.Linear(sample_shape[-1], classes)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    _, result = train(
        tmp_path, data="own_sequences_a:data", model="own_sequences_a:model", epochs=30, lr=0.5,
        train_samples=None, test_samples=None, eval_every="never", accumulate=2,
    )  # fmt: skip
    assert result["final"]["test_accuracy"] > 0.8
    assert result["samples"] == 30 * 64


def test_token_tensors_train_to_their_successors(tmp_path: Path) -> None:
    _, result = train(
        tmp_path, data="tests.support.user_code:word_pairs", optimizer="adam", lr=0.02, epochs=60,
        model="tests.support.user_code:NextToken", train_samples=None, test_samples=None,
        eval_every="never",
    )  # fmt: skip
    assert result["final"]["test_accuracy"] > 0.8


def test_text_from_a_file_trains(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 300)
    _, result = train(
        tmp_path, data=f"text:{text}", context=16, model="tests.support.user_code:NextToken",
        train_samples=None, test_samples=None, optimizer="adam", lr=0.02, epochs=20,
    )  # fmt: skip
    assert result["final"]["test_accuracy"] > 0.99
    assert result["samples"] == 20 * ((2400 - 240 - 1) // 16)


def test_outputs_that_do_not_fit_the_targets_are_explained_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_outputs_a.py").write_text(
        "from torch import nn\n"
        "class LastToken(nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.table = nn.Embedding(classes, classes)\n"
        "    def forward(self, tokens):\n"
        "        return self.table(tokens[:, -1])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, data="stories", context=8, model="own_outputs_a:LastToken")
    assert str(caught.value) == (
        "--model: outputs of shape (32, 8, classes) are needed for these targets, got (32, 256)"
    )


def test_measurement_overhead_is_at_most_one_percent(tmp_path: Path) -> None:
    """The run's own account of it, on iterations of some milliseconds."""
    _, result = train(tmp_path, epochs=10, batch_size=100, eval_every="never")
    assert 0 < result["measurement_overhead"]["fraction"] <= 0.01
