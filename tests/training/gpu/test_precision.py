"""`--precision auto` and `--channels-last auto`: candidates, decision, and what a run records."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.config import RunConfig, from_mapping
from paceline.data.loading import load_dataset
from paceline.launch import launcher
from paceline.models.build import build_model
from paceline.records import RunFolder, numerics_text
from paceline.training import run_state
from paceline.training.checkpoint import newest_checkpoint
from paceline.training.device import side_stream
from paceline.training.gpu import precision
from paceline.training.gpu.cuda_graph import CudaGraphBackend
from paceline.training.gpu.precision import (
    Choice,
    Format,
    GpuStepTimer,
    Measurement,
    candidates,
    fastest,
    interleave,
    microbatch_samples,
    resolve,
)
from tests.training.test_resume import SMALL, cut_after, result_of, uninterrupted

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
FP32, FP32_LAST = Format("fp32"), Format("fp32", channels_last=True)
BF16, BF16_LAST = Format("bf16"), Format("bf16", channels_last=True)
CONVOLUTIONAL, DENSE = nn.Conv2d(1, 2, 3), nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def bf16_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_has_bf16", lambda _: True)


@pytest.mark.parametrize(
    ("settings", "model", "expected"),
    [
        ({}, CONVOLUTIONAL, [FP32, FP32_LAST, BF16, BF16_LAST]),
        ({}, DENSE, [FP32, BF16]),
        ({"precision": "bf16"}, CONVOLUTIONAL, [BF16, BF16_LAST]),
        ({"precision": "fp16"}, DENSE, [Format("fp16")]),
        ({"channels_last": "off"}, CONVOLUTIONAL, [FP32, BF16]),
        ({"channels_last": "on"}, DENSE, [FP32_LAST, BF16_LAST]),
    ],
    ids=str,
)
def test_candidates_on_a_gpu_are_what_settings_and_model_leave_open(
    settings: dict[str, Any], model: nn.Module, expected: list[Format]
) -> None:
    assert candidates(RunConfig(**settings), model, GPU) == expected


def test_a_gpu_without_bf16_and_a_cpu_use_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert candidates(RunConfig(), CONVOLUTIONAL, CPU) == [FP32]
    monkeypatch.setattr(precision, "_has_bf16", lambda _: False)
    assert candidates(RunConfig(), CONVOLUTIONAL, GPU) == [FP32, FP32_LAST]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([3.4, 3.3, 1.9, 1.5], BF16_LAST),
        ([3.4, 3.3, 1.9, 1.85], BF16),
        ([1.0, 1.0, 1.0, 1.0], FP32),
        ([1.0, 0.96, 0.96, 0.96], FP32),
        ([1.0, 0.96, 0.96, 0.95], BF16_LAST),
        ([1.0, 0.90, 0.89, 0.88], FP32_LAST),
        ([1.0, 2.0, 0.9, 2.0], BF16),
    ],
)
def test_a_format_must_be_five_percent_faster_than_a_simpler_one(
    seconds: list[float], expected: Format
) -> None:
    assert fastest(dict(zip([FP32, FP32_LAST, BF16, BF16_LAST], seconds, strict=True))) == expected


def fake_measure(**seconds: float) -> Callable[[Sequence[Format]], Measurement]:
    """Measured step times by precision; the formats without one fail."""

    def measure(formats: Sequence[Format]) -> Measurement:
        times = {one: seconds[one.precision] for one in formats if one.precision in seconds}
        failures = {one: "no kernel" for one in formats if one not in times}
        return Measurement(times, "eager", failures)

    return measure


def refuse(formats: Sequence[Format]) -> Measurement:
    raise AssertionError(f"measured {formats}")


def resolve_alone(
    config: RunConfig,
    measure: Callable[[Sequence[Format]], Measurement],
    device: torch.device = GPU,
    saved: dict[str, Any] | None = None,
) -> Choice:
    with in_process.single() as communicator:
        return resolve(config, DENSE, device, communicator, measure, saved)


@pytest.mark.parametrize(
    ("settings", "device", "reason"),
    [
        ({"precision": "bf16", "channels_last": "off"}, GPU, "given"),
        ({}, CPU, "CPU"),
        ({"precision": "bf16"}, CPU, "given"),
        ({"channels_last": "on"}, CPU, "given"),
        ({"precision": "fp16"}, GPU, "only choice"),
    ],
)
def test_nothing_is_measured_without_a_choice(
    settings: dict[str, Any], device: torch.device, reason: str
) -> None:
    assert resolve_alone(RunConfig(**settings), refuse, device).reason == reason


def test_a_format_that_fails_is_not_chosen() -> None:
    choice = resolve_alone(RunConfig(), fake_measure(fp32=1.0))
    assert (choice.precision, choice.reason) == ("fp32", "measured")
    assert choice.failures == {"bf16": "no kernel"}


def test_the_simplest_format_is_used_if_none_can_be_measured() -> None:
    choice = resolve_alone(RunConfig(), fake_measure())
    assert (choice.precision, choice.channels_last) == ("fp32", False)
    assert choice.reason == "not measured: no kernel"


def test_a_resumed_run_keeps_the_format_of_its_checkpoint() -> None:
    saved = {"precision": "bf16", "channels_last": "on"}
    choice = resolve_alone(RunConfig(), refuse, CPU, saved)
    assert (choice.precision, choice.channels_last, choice.reason) == ("bf16", True, "checkpoint")
    given = resolve_alone(RunConfig(precision="fp32"), refuse, GPU, saved)
    assert (given.precision, given.channels_last) == ("fp32", True)


def test_all_ranks_use_the_choice_of_rank_0() -> None:
    def work(communicator: Communicator) -> Choice:
        measure = fake_measure(fp32=2.0, bf16=1.0) if communicator.rank == 0 else refuse
        # Another rank may have another device.
        device = GPU if communicator.rank == 0 else CPU
        return resolve(RunConfig(), DENSE, device, communicator, measure)

    first, *others = in_process.run(3, work)
    assert first.precision == "bf16"
    assert others == [first] * 2


def test_the_resolved_config_has_no_auto() -> None:
    config = Choice.of(BF16_LAST, "measured").apply(RunConfig())
    assert (config.precision, config.is_channels_last) == ("bf16", True)
    with pytest.raises(AssertionError, match="resolves it"):
        _ = RunConfig().is_channels_last


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        ({"batch_size": 64}, 64),
        ({"batch_size": 64, "accumulate": 3}, 22),
        ({"batch_size": 64, "nproc_per_node": 4}, 16),
        ({"batch_size": 64, "nproc_per_node": 2, "shares": "3,1"}, 48),
        ({"batch_size": 8, "accumulate": 100}, 1),
        ({"batch_size": 500}, 100),
    ],
    ids=str,
)
def test_measured_batch_is_a_microbatch_of_rank_0(settings: dict[str, Any], samples: int) -> None:
    assert microbatch_samples(from_mapping(settings), 100) == samples


def test_rounds_interleave_the_formats_and_keep_the_shortest_time() -> None:
    order: list[Format] = []
    # The first round is slow for one format, a later one for the other.
    slow = {0: FP32, 3: BF16}

    def time_steps(step: Callable[[], object], count: int) -> float:
        step()
        one = order[-1]
        factor = 9.0 if slow.get((len(order) - 1) // 2) == one else 1.0
        return {FP32: 0.003, BF16: 0.002}[one] * factor * count

    steps = {one: lambda one=one: order.append(one) for one in (FP32, BF16)}
    times = interleave(steps, time_steps)
    assert times == pytest.approx({FP32: 0.003, BF16: 0.002})
    assert order == [FP32, BF16] * (len(order) // 2)
    assert len(order) == 2 * (1 + precision.MOST_ROUNDS)


def test_long_steps_end_the_measurement_after_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(precision, "perf_counter", lambda: float(next(clock)))
    counts: list[int] = []

    def time_steps(step: Callable[[], object], count: int) -> float:
        counts.append(count)
        return 0.5 * count

    assert interleave({FP32: lambda: None}, time_steps) == {FP32: 0.5}
    assert counts == [1, 1]


def test_a_cpu_run_records_fp32_and_keeps_auto_in_its_config(tmp_path: Path) -> None:
    result = uninterrupted(tmp_path, checkpoint_every=8)
    (worker,) = result["workers"]
    assert worker["numerics"] == {"precision": "fp32", "channels_last": False, "reason": "CPU"}
    folder = RunFolder.open(tmp_path / "whole")
    config = json.loads(folder.config_file.read_text())["config"]
    assert (config["precision"], config["channels_last"]) == ("auto", "auto")
    found = newest_checkpoint(folder.checkpoints)
    assert found is not None
    settings = found.state["settings"]
    assert (settings["precision"], settings["channels_last"]) == ("fp32", "off")


def test_resumed_auto_run_keeps_the_chosen_format_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = uninterrupted(tmp_path, precision="bf16", channels_last="on")
    with monkeypatch.context() as patch:
        patch.setattr(precision, "candidates", lambda *_: [BF16_LAST])
        folder = cut_after(tmp_path, 5, monkeypatch, checkpoint_every=2)
    resumed = result_of(launcher.resume(str(folder.path), {}, quiet=True))
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["warnings"] == []
    numerics = resumed["workers"][0]["numerics"]
    assert numerics == {"precision": "bf16", "channels_last": True, "reason": "checkpoint"}


def test_boolean_switches_of_older_checkpoints_are_read_as_on_and_off() -> None:
    saved = {"channels_last": True, "precision": "fp32", "reshuffle": True}
    settings = run_state.saved_settings({"settings": saved})
    assert settings == {**saved, "channels_last": "on"}
    config = from_mapping({"precision": "fp32", "channels_last": True})
    assert run_state.changed_settings(settings, config) == []


def test_text_has_the_format_and_the_measured_times() -> None:
    measured = Measurement({FP32: 0.0034, BF16_LAST: 0.0019}, "cuda graph")
    text = numerics_text(Choice.of(BF16_LAST, "measured", measured).to_dict())
    assert text == (
        "bf16 channels-last (measured: fp32 3.40 ms, bf16 channels-last 1.90 ms per step)"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("is_captured", [True, False])
def test_measurement_leaves_weights_buffers_and_random_states(is_captured: bool) -> None:
    config = from_mapping({**SMALL, "model": "resnet18"})
    dataset = load_dataset(config)
    model = build_model("resnet18", dataset.sample_shape, dataset.classes, 0).to(GPU)
    torch.rand(3, device=GPU)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = random.getstate(), str(np.random.get_state())
    generators = torch.get_rng_state(), torch.cuda.get_rng_state(GPU)
    formats = candidates(config, model, GPU)
    backend = CudaGraphBackend() if is_captured else None
    measure = GpuStepTimer(config, model, dataset, GPU, backend)
    with side_stream(GPU):
        # Libraries keep memory for each stream that they were used on.
        measure(formats)
        gc.collect()
        memory_bytes = torch.cuda.memory_allocated(GPU)
        measured = measure(formats)
        gc.collect()
    assert list(measured.step_seconds) == formats
    assert measured.method == ("cuda graph" if is_captured else "eager")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert (random.getstate(), str(np.random.get_state())) == states
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert torch.equal(torch.cuda.get_rng_state(GPU), generators[1])
    assert torch.cuda.memory_allocated(GPU) <= memory_bytes


class Synchronizing(nn.Module):
    """Waits for the GPU in its forward pass, which a CUDA graph cannot capture."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs.flatten(1))
        return outputs * float(outputs.detach().abs().max() > 0)


@pytest.mark.gpu
def test_a_model_that_cannot_be_captured_is_timed_eagerly() -> None:
    config = from_mapping(SMALL)
    dataset = load_dataset(config)
    model = Synchronizing(dataset.train.inputs[0].numel())
    with side_stream(GPU):
        measured = GpuStepTimer(config, model, dataset, GPU, CudaGraphBackend())([FP32, BF16])
    assert measured.method == "eager"
    assert list(measured.step_seconds) == [FP32, BF16]
    # The GPU is usable after the failed capture.
    assert float(torch.ones(2, device=GPU).sum()) == 2
