"""Captured steps equal eager steps bit for bit; what cannot be captured runs eagerly.

A recorder on the CPU stands for CUDA graphs: see tests/support/recorded_graph.py.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.objects import first_value
from paceline.config import RunConfig
from paceline.config.parsing import from_mapping
from paceline.data.loading import load_dataset
from paceline.data.pipeline import InputPipeline
from paceline.data.resident import ResidentEvaluationPipeline, ResidentPipeline
from paceline.data.sampling import GlobalBatchSampler
from paceline.launch import launcher
from paceline.measure.gradient_noise import GradientNoise
from paceline.measure.memory import WorkerMemory
from paceline.measure.phase_clock import CudaPhaseClock, PhaseClock
from paceline.models.build import GroupedModel, build_model
from paceline.strategies import create_strategy
from paceline.strategies.replica import Replica
from paceline.training.coordination import StepCoordinator
from paceline.training.evaluation import Evaluator
from paceline.training.gpu.cuda_graph import (
    COPIES,
    MAX_FUNCTIONS,
    CudaGraphBackend,
    GraphCache,
    capture_obstacle,
)
from paceline.training.gpu.precision import autocast
from paceline.training.optimizer import build_optimizer, keep_rate_on_device
from paceline.training.rank_report import weights_sha256
from paceline.training.step import TrainStep
from tests.support import toy_replicas as toy
from tests.support.recorded_graph import GraphError, RecordingBackend

CPU = torch.device("cpu")


class CpuMark:
    def __init__(self) -> None:
        self.at = perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Self, /) -> float:
        return 1000 * (end_event.at - self.at)


class CpuMarks:
    """Records marks of a GPU that is always idle."""

    def record(self, _: object) -> CpuMark:
        return CpuMark()

    def record_in_graph(self) -> CpuMark:
        return CpuMark()

    def record_anchor(self) -> CpuMark:
        return CpuMark()

    def use_current_stream(self) -> None: ...


STORIES = {"data": "stories", "context": 16, "lr": 0.001, "weight_decay": 0.1}
OWN_TASKS = "tests.training.test_own_tasks"


def config_of(**settings: Any) -> RunConfig:
    # 40 samples in batches of 16: the last batch of an epoch has 8.
    small = {"data": "digits", "train_samples": 40, "batch_size": 16, "epochs": 4, "seed": 3}
    return from_mapping({**small, "precision": "fp32", **settings})


class Trained:
    """A short training on the CPU, with steps that are recorded and replayed or run eagerly."""

    def __init__(self, config: RunConfig, graphs: Callable[[Replica], GraphCache] | None) -> None:
        dataset = load_dataset(config)
        order = GlobalBatchSampler(len(dataset.train), config.global_batch_size, config.seed)
        pipeline = ResidentPipeline(
            dataset.train, dataset.transform, order, config.augment, config.seed
        )
        torch.manual_seed(config.seed)
        model = build_model(
            config.model,
            dataset.sample_shape,
            dataset.classes,
            config.seed,
            options=config.model_options,
            has_tokens=dataset.has_tokens,
        )
        undecayed = model.undecayed_weights() if isinstance(model, GroupedModel) else ()
        optimizer = build_optimizer(config, model.parameters(), undecayed)
        # As on a GPU.
        keep_rate_on_device(optimizer, CPU)
        self.replica = Replica(
            model=model,
            optimizer=optimizer,
            clock=CudaPhaseClock(PhaseClock(), CpuMarks()),
            forward=model,
            scaler=torch.amp.GradScaler("cpu", enabled=config.precision == "fp16"),
            communicator=in_process.single(),
            clip_norm=config.clip_norm,
        )
        if isinstance(config.noise_every, int):
            noise = GradientNoise(config.noise_every, self.replica.scaler, by_microbatch=True)
            self.replica.noise = noise
        strategy = create_strategy("single", {})
        strategy.setup(self.replica)
        step = TrainStep(
            config,
            self.replica,
            strategy,
            pipeline,
            StepCoordinator(config, strategy, self.replica),
            autocast(config.precision, CPU),
            WorkerMemory(CPU),
            graphs(self.replica) if graphs else None,
        )
        steps = range(config.iterations_in_total(order.batches_per_epoch))
        self.losses = [step(iteration, 0)[0] for iteration in steps]

    @property
    def state(self) -> tuple[str, list[float]]:
        losses = [float(loss) for loss in self.losses]
        return weights_sha256(self.replica.model.state_dict()), losses


def cache_of(backend: RecordingBackend, **options: Any) -> Callable[[Replica], GraphCache]:
    def make(replica: Replica) -> GraphCache:
        assert isinstance(replica.clock, CudaPhaseClock)
        return GraphCache(backend, [replica.clock, replica.noise], **{"warmup": 2, **options})

    return make


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "lenet", "optimizer": "adamw", "lr": 0.001},
        {"model": "cnn", "lr": 0.01, "augment": "crop"},
        {"model": "resnet18", "model_options": {"width": 0.0625}, "lr": 0.01},
        {"model": "mlp", "schedule": "one_cycle", "lr": 0.01},
        {"model": "mlp", "schedule": "cosine", "warmup_epochs": 2, "momentum": 0},
        {"model": "mlp", "accumulate": 3, "clip_norm": 0.5, "label_smoothing": 0.1},
        {"model": "mlp", "precision": "bf16", "optimizer": "adam", "lr": 0.001},
        {"model": "mlp", "precision": "fp16", "clip_norm": 0.5},
        {"model": "mlp", "precision": "fp16", "momentum": 0},
        {"model": "lenet", "optimizer": "muon", "lr": 0.002, "weight_decay": 0.01},
        {
            "model": "whitened_cnn",
            "model_options": {"width": 0.05},
            "optimizer": "muon",
            "schedule": "linear",
            "weight_decay": 1.0,
            "augment": "shift,alternate_flip",
        },
        *(
            {"model": "gpt-nano", **STORIES, "optimizer": optimizer, "precision": precision}
            for optimizer in ("sgd", "adamw", "muon")
            for precision in ("fp32", "bf16")
        ),
        {"model": "gpt-nano", "model_options": {"checkpoint": "true"}, **STORIES, "clip_norm": 0.5},
        {"model": f"{OWN_TASKS}:Height", "data": f"{OWN_TASKS}:heights", "accumulate": 2},
        {"model": f"{OWN_TASKS}:Digits", "data": f"{OWN_TASKS}:numbers", "precision": "bf16"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_captured_steps_equal_eager_steps(settings: dict[str, Any]) -> None:
    config = config_of(**settings)
    backend = RecordingBackend()
    captured = Trained(config, cache_of(backend))
    eager = Trained(config, None)
    # Two warm-up steps of full batches and one of the smaller last batch are eager.
    assert backend.replays == 12 - 3
    assert captured.state == eager.state


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_captured_steps_measure_the_same_gradients(precision: str) -> None:
    config = config_of(model="mlp", accumulate=2, noise_every=2, precision=precision, epochs=8)
    backend = RecordingBackend()
    noises = []
    for graphs in (cache_of(backend), None):
        trained = Trained(config, graphs)
        noise = trained.replica.noise
        noise.add_table(noise.take()[None])
        noises.append((list(noise.samples), trained.state))
    assert backend.replays > 12
    assert noises[0] == noises[1]
    # A few steps of fp16 may overflow.
    assert len(noises[0][0]) > 8


def test_shapes_after_the_first_need_one_eager_step() -> None:
    backend = RecordingBackend()
    graphs = GraphCache(backend, [], warmup=3)
    values = {name: torch.zeros(()) for name in "ab"}

    def add(name: str) -> Callable[[], Tensor]:
        return lambda: values[name].add_(1).clone()

    for name in "aaaabba":
        graphs.run(name, add(name))
    assert {name: float(value) for name, value in values.items()} == {"a": 5, "b": 2}
    assert backend.replays == 3


def test_graphs_of_consecutive_steps_take_turns() -> None:
    graphs = GraphCache(RecordingBackend(), [], warmup=1)
    value = torch.zeros(())
    results = [graphs.run("step", lambda: value.add_(1).clone()) for _ in range(12)]
    assert [float(result) for result in results] == [*range(1, 13)]
    assert graphs.report.graphs == COPIES
    assert graphs.report.captured
    assert graphs.report.reason is None


def test_number_of_shapes_is_limited() -> None:
    graphs = GraphCache(RecordingBackend(), [], warmup=1)
    value = torch.zeros(())
    for _ in range(3):
        for key in range(MAX_FUNCTIONS + 3):
            graphs.run(key, lambda: value.add_(1))
    assert float(value) == 3 * (MAX_FUNCTIONS + 3)
    assert graphs.report.graphs == MAX_FUNCTIONS


def test_steps_run_eagerly_until_the_strategy_is_warm() -> None:
    backend, is_warm = RecordingBackend(), [False]
    graphs = GraphCache(backend, [], warmup=1, is_warm=lambda: is_warm[0])
    value = torch.zeros(())
    for step in range(6):
        is_warm[0] = step >= 4
        graphs.run("step", lambda: value.add_(1))
    assert (float(value), backend.replays) == (6, 2)


class ReadsItsInput(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if float(inputs.sum()) > 0 else -inputs


class Draws(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.draw()


class Counts(nn.Module):
    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        return inputs * self.passes


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (ReadsItsInput, "_local_scalar_dense.default reads a value"),
        (lambda: Draws(random.random), "the model draws random numbers on the CPU"),
        (lambda: Draws(lambda: np.random.rand()), "the model draws random numbers on the CPU"),
        (Counts, "the model changes Counts.passes in each pass"),
    ],
)
def test_model_that_cannot_be_repeated_runs_eagerly(
    make: Callable[[], nn.Module], reason: str
) -> None:
    def outputs(capture: bool) -> list[float]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        model, inputs = make(), torch.ones(1)
        reasons: list[str] = []
        graphs = GraphCache(
            RecordingBackend(), [], warmup=2, model=model, on_failure=reasons.append
        )
        run = (
            partial(graphs.run, "step", partial(model, inputs))
            if capture
            else partial(model, inputs)
        )
        results = [run() for _ in range(5)]
        if capture:
            assert len(reasons) == 1
            assert reason in reasons[0]
            assert graphs.report.reason == reasons[0]
            assert not graphs.report.captured
        return [float(result) for result in results]

    assert outputs(capture=True) == outputs(capture=False)


def test_failed_capture_may_end_the_run() -> None:
    class StopError(Exception): ...

    def fail(reason: str) -> None:
        raise StopError(reason)

    graphs = GraphCache(RecordingBackend(), [], warmup=0, on_failure=fail)
    with pytest.raises(StopError, match="reads a value"):
        graphs.run("step", lambda: torch.ones(1) * float(torch.ones(1)))


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_update_that_cannot_be_captured_runs_eagerly(clip_norm: float | None) -> None:
    # With fp16, the program reads whether a gradient overflowed before a step of Muon.
    config = config_of(
        model="mlp", optimizer="muon", precision="fp16", lr=0.002, clip_norm=clip_norm
    )
    reasons: list[str] = []

    def make(replica: Replica) -> GraphCache:
        def on_failure(reason: str) -> None:
            reasons.append(reason)
            replica.discard_step()

        return cache_of(RecordingBackend(), on_failure=on_failure)(replica)

    assert Trained(config, make).state == Trained(config, None).state
    assert len(reasons) == 1


def test_ranks_capture_together_or_not_at_all() -> None:
    def train(communicator: Communicator) -> tuple[bool, str | None, list[float]]:
        def step() -> torch.Tensor:
            factor = float(torch.ones(1)) if communicator.rank == 1 else 1.0
            return torch.ones(1) * factor

        agree = partial(first_value, communicator)
        graphs = GraphCache(RecordingBackend(), [], warmup=0, agree=agree)
        losses = [float(graphs.run("step", step)) for _ in range(3)]
        return graphs.report.captured, graphs.report.reason, losses

    outcomes = in_process.run(3, train)
    assert [losses for *_, losses in outcomes] == [[1.0] * 3] * 3
    assert not any(captured for captured, *_ in outcomes)
    assert len({reason for _, reason, _ in outcomes}) == 1


def test_obstacle_of_one_rank_applies_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    # As with NCCL.
    monkeypatch.setattr(Communicator, "capture_obstacle", lambda _: None)
    config = config_of(model="mlp")
    dataset = load_dataset(config)

    def obstacle(communicator: Communicator) -> str | None:
        strategy = create_strategy("allreduce", {})
        strategy.setup(toy.replica(communicator, toy.sgd()))
        kind = InputPipeline if communicator.rank == 1 else ResidentPipeline
        pipeline = kind(dataset.train, dataset.transform, GlobalBatchSampler(40, 16, seed=3))
        return capture_obstacle(config, torch.device("cuda", 0), pipeline, strategy)

    assert in_process.run(2, obstacle) == ["the training set does not fit in GPU memory"] * 2


def test_recorder_rejects_what_a_cuda_graph_cannot_contain() -> None:
    with pytest.raises(GraphError):
        RecordingBackend().capture(lambda: torch.ones(1) * torch.ones(1).item())


def test_cpu_runs_eagerly() -> None:
    config = config_of(model="mlp")
    trained = Trained(config, None)
    strategy = create_strategy("single", {})
    strategy.setup(trained.replica)
    pipeline = ResidentPipeline(
        load_dataset(config).train, None, GlobalBatchSampler(40, 16, seed=3)
    )
    assert capture_obstacle(config, CPU, pipeline, strategy) == "the device is not a GPU"
    gpu = torch.device("cuda", 0)
    assert capture_obstacle(config, gpu, pipeline, strategy) is None
    off = config_of(model="mlp", cuda_graph="off")
    assert capture_obstacle(off, gpu, pipeline, strategy) == "--cuda-graph off"
    slow = config_of(model="mlp", slow="0=2")
    assert "--slow" in str(capture_obstacle(slow, gpu, pipeline, strategy))


@pytest.mark.parametrize("settings", [{"model": "cnn"}, {"model": "gpt-nano", **STORIES}])
@pytest.mark.parametrize("is_resident", [True, False])
def test_captured_evaluation_equals_eager_evaluation(
    settings: dict[str, Any], is_resident: bool
) -> None:
    config = config_of(test_samples=45, eval_batch_size=10, channels_last="off", **settings)
    check_captured_evaluation(config, is_resident)


def test_captured_evaluation_with_own_loss_and_metrics_equals_eager_evaluation() -> None:
    task = {"model": f"{OWN_TASKS}:Digits", "data": f"{OWN_TASKS}:numbers"}
    metrics = f"accuracy,{OWN_TASKS}:last_logit"
    config = config_of(**task, metrics=metrics, eval_batch_size=9, channels_last="off")
    check_captured_evaluation(config, is_resident=True)


def check_captured_evaluation(config: RunConfig, is_resident: bool) -> None:
    replica = Trained(config, None).replica
    strategy = create_strategy("single", {})
    strategy.setup(replica)
    dataset = load_dataset(config)
    backend = RecordingBackend()
    captured, eager = (
        Evaluator(config, replica, strategy, dataset, CPU, nullcontext(), graphs)
        for graphs in (GraphCache(backend, [], warmup=1, copies=1), None)
    )
    if is_resident:
        captured._pipelines[False] = ResidentEvaluationPipeline(
            dataset.test, dataset.transform, config.eval_batch_size
        )
    for _ in range(3):
        assert captured(alone=False) == eager(alone=False)
        for weight in replica.trainable:
            weight.data.mul_(1.5)
    # All but the first batch of each size; a graph cannot read another batch from the CPU.
    assert backend.replays == (13 if is_resident else 0)


GPU_CASES = [
    {"model": model, "optimizer": optimizer, "precision": precision, "lr": rate}
    for model in ("lenet", "cnn", "vgg11", "resnet18")
    for optimizer, rate in (("sgd", 0.02), ("adamw", 0.001))
    for precision in ("fp32", "bf16")
] + [
    {"model": "whitened_cnn", "optimizer": "muon", "precision": "bf16", "lr": 0.014,
     "channels_last": "on", "augment": "shift,alternate_flip", "weight_decay": 1.4, "eval_views": 6}
] + [
    # Long windows: attention adds the gradients of many blocks.
    {"model": "gpt-nano", **STORIES, "context": 1024, "optimizer": optimizer,
     "precision": precision, "augment": []}
    for optimizer in ("sgd", "adamw", "muon")
    for precision in ("fp32", "bf16")
]  # fmt: skip


def train_on_gpu(out: Path, **settings: Any) -> dict[str, Any]:
    small = {
        "data": "digits", "train_samples": 600, "test_samples": 100, "batch_size": 64,
        "iterations": 25, "augment": "crop,flip", "device": "cuda", "sample_seconds": 0,
        "tensorboard": False, "out": str(out), "cuda_graph": "on",
        # Measured formats may differ: they are the fastest, captured or not.
        "precision": "fp32", "channels_last": "off",
    }  # fmt: skip
    _, result, code = launcher.train(from_mapping({**small, **settings}), quiet=True)
    assert code == 0
    assert result is not None
    return dict(result)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", GPU_CASES, ids=lambda settings: "-".join(map(str, settings.values()))
)
def test_captured_runs_equal_eager_runs_on_a_gpu(tmp_path: Path, settings: dict[str, Any]) -> None:
    captured = train_on_gpu(tmp_path, **settings)
    eager = train_on_gpu(tmp_path, **settings, cuda_graph="off")
    (worker,) = captured["workers"]
    assert worker["cuda_graph"]["captured"]
    assert not eager["workers"][0]["cuda_graph"]["captured"]
    assert captured["weights_sha256"] == eager["weights_sha256"]
    assert captured["final"] == eager["final"]
    assert sum(worker["phases"].values()) == pytest.approx(captured["wall_seconds"], rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp16", "clip_norm": 1.0},
        {"accumulate": 4, "label_smoothing": 0.1, "schedule": "one_cycle"},
        {"optimizer": "muon", "lr": 0.002},
    ],
    ids=lambda settings: "-".join(map(str, settings)),
)
def test_captured_runs_with_other_settings_equal_eager_runs_on_a_gpu(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    captured = train_on_gpu(tmp_path, model="lenet", **settings)
    eager = train_on_gpu(tmp_path, model="lenet", **settings, cuda_graph="off")
    assert captured["workers"][0]["cuda_graph"]["captured"]
    assert captured["weights_sha256"] == eager["weights_sha256"]


@pytest.mark.gpu
def test_captured_compiled_run_equals_the_eager_one_on_a_gpu(tmp_path: Path) -> None:
    """In processes of their own, because torch's compiler leaves threads and processes."""
    command = [sys.executable, "-m", "paceline", "train", "--model=lenet", "--data=digits"]
    command += ["--train-samples=600", "--test-samples=100", "--batch-size=64", "--iterations=25"]
    command += ["--device=cuda", "--precision=fp32", "--compile", "--quiet", f"--out={tmp_path}"]
    results = {}
    for graph in ("on", "off"):
        subprocess.run([*command, f"--cuda-graph={graph}", f"--name={graph}"], check=True)
        results[graph] = json.loads((tmp_path / graph / "result.json").read_text())
    assert results["on"]["workers"][0]["cuda_graph"]["captured"]
    assert results["on"]["weights_sha256"] == results["off"]["weights_sha256"]


@pytest.mark.gpu
def test_captured_run_resumes_bit_for_bit_on_a_gpu(tmp_path: Path) -> None:
    settings = {"model": "resnet18", "precision": "bf16", "channels_last": "on", "lr": 0.02}
    whole = train_on_gpu(tmp_path / "whole", **settings, iterations=30)
    train_on_gpu(tmp_path / "cut", **settings, iterations=17, checkpoint_every=17, name="cut")
    _, resumed, _ = launcher.resume(str(tmp_path / "cut" / "cut"), {"iterations": 30}, quiet=True)
    assert resumed is not None
    assert resumed["workers"][0]["cuda_graph"]["captured"]
    assert resumed["weights_sha256"] == whole["weights_sha256"]


class FakeGraph:
    """Records the pools of captures, in the place of torch.cuda.CUDAGraph."""

    pools: ClassVar[list[object]] = []

    def capture_begin(self, pool: object = None, **_: object) -> None:
        self.pools.append(pool)

    def capture_end(self) -> None: ...


def test_graphs_share_a_pool_until_the_last_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = itertools.count(1)
    monkeypatch.setattr(FakeGraph, "pools", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    backend = CudaGraphBackend()
    graphs = [backend.capture(lambda: torch.zeros(1))[0] for _ in range(2)]
    del graphs[0]
    graphs.append(backend.capture(lambda: torch.zeros(1))[0])
    graphs.clear()
    graphs.append(backend.capture(lambda: torch.zeros(1))[0])
    assert FakeGraph.pools == [1, 1, 1, 2]
