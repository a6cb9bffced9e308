"""Precision and memory format of a run: `--precision auto` and `--channels-last auto`.

On a CPU, auto means fp32 and contiguous. On a GPU, rank 0 times a training step in each format that
the settings leave open, and all ranks use its choice. Training only sees the config that
`Choice.apply` returns, which has no auto.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json
from paceline.config import RunConfig, Switch
from paceline.data.dataset import Dataset
from paceline.data.pipeline import EvaluationPipeline
from paceline.data.sampling import rank_shard
from paceline.errors import error_line
from paceline.models.build import seeded
from paceline.records import format_name
from paceline.training.gpu.cuda_graph import GraphBackend
from paceline.training.loss import loss_of

MIN_GAIN = 0.05
"""A format replaces a simpler one only if its step is shorter by this fraction."""
ROUND_SECONDS = 0.004
"""Short steps are repeated for about this long in each round."""
MOST_STEPS = 100
"""In one round."""
BUDGET_SECONDS = 0.15
"""For all rounds; long steps get two rounds even if these take longer."""
MOST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Format:
    """The precision of the forward and backward passes, and the memory format of the model."""

    precision: str = "fp32"
    channels_last: bool = False

    def __str__(self) -> str:
        return format_name(self.precision, self.channels_last)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Step times of the formats that could run, in the order of the candidates."""

    step_seconds: dict[Format, float]
    method: str
    """How the steps were run: "cuda graph" or "eager"."""
    failures: dict[Format, str] = field(default_factory=dict)
    """Why the other formats could not run."""
    seconds: float = 0.0
    memory_bytes: int = 0
    """Peak GPU memory, which is released before training."""
    is_from_earlier_run: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The format of a run, and its reason."""

    precision: str
    channels_last: bool
    reason: str
    """Such as "given", "CPU", "measured" or "checkpoint"."""
    method: str | None = None
    step_seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    measurement_seconds: float = 0.0
    memory_bytes: int = 0

    @classmethod
    def of(cls, chosen: Format, reason: str, measured: Measurement | None = None) -> Choice:
        if measured is None:
            return cls(chosen.precision, chosen.channels_last, reason)
        return cls(
            chosen.precision,
            chosen.channels_last,
            reason,
            measured.method,
            {str(one): seconds for one, seconds in measured.step_seconds.items()},
            {str(one): cause for one, cause in measured.failures.items()},
            measured.seconds,
            measured.memory_bytes,
        )

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the config of training, with this format instead of auto."""
        channels_last: Switch = "on" if self.channels_last else "off"
        return dataclasses.replace(config, precision=self.precision, channels_last=channels_last)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry `numerics` of a worker in result.json."""
        values = dataclasses.asdict(self)
        names = ("precision", "channels_last", "reason")
        return values if self.method else {name: values[name] for name in names}


Measure = Callable[[Sequence[Format]], Measurement]
"""Times a training step in each format; those that cannot run are among the failures."""


def resolve(
    config: RunConfig,
    model: nn.Module,
    device: torch.device,
    communicator: Communicator,
    measure: Measure,
    saved: Mapping[str, Any] | None = None,
) -> Choice:
    """Return rank 0's choice on all ranks. Collective.

    `saved` are the settings of the checkpoint that the run resumes from: it keeps their format.
    """
    if "auto" not in (config.precision, config.channels_last):
        return Choice.of(Format(config.precision, config.channels_last == "on"), "given")
    mine = None
    if communicator.rank == 0:
        mine = _choose(config, model, device, measure, saved or {}).to_dict()
    return Choice(**broadcast_json(communicator, mine))


def _choose(
    config: RunConfig,
    model: nn.Module,
    device: torch.device,
    measure: Measure,
    saved: Mapping[str, Any],
) -> Choice:
    kept = {
        name: saved[name]
        for name in ("precision", "channels_last")
        if getattr(config, name) == "auto" and name in saved
    }
    open_formats = candidates(dataclasses.replace(config, **kept), model, device)
    if len(open_formats) == 1:
        reason = "only choice"
        if kept:
            reason = "checkpoint"
        elif device.type == "cpu":
            reason = "CPU" if config.precision == config.channels_last == "auto" else "given"
        return Choice.of(open_formats[0], reason)
    measured = measure(open_formats)
    if not measured.step_seconds:
        cause = next(iter(measured.failures.values()), "no format could run")
        return Choice.of(open_formats[0], f"not measured: {cause}", measured)
    reason = "measured before" if measured.is_from_earlier_run else "measured"
    return Choice.of(fastest(measured.step_seconds), reason, measured)


def candidates(config: RunConfig, model: nn.Module, device: torch.device) -> list[Format]:
    """Return the formats that the settings, the device and the model leave open, simplest first."""
    precisions, layouts = [config.precision], [config.channels_last == "on"]
    is_gpu = device.type == "cuda"
    if config.precision == "auto":
        precisions = ["fp32", "bf16"] if is_gpu and _has_bf16(device) else ["fp32"]
    if config.channels_last == "auto":
        # Only convolutions of images have four-dimensional weights.
        has_convolutions = any(weight.dim() == 4 for weight in model.parameters())
        layouts = [False, True] if is_gpu and has_convolutions else [False]
    return [Format(*each) for each in itertools.product(precisions, layouts)]


def fastest(step_seconds: Mapping[Format, float]) -> Format:
    """Return the format to train in; of formats that are about equally fast, the first."""
    (chosen, least), *others = step_seconds.items()
    for other, seconds in others:
        if seconds <= least * (1 - MIN_GAIN):
            chosen, least = other, seconds
    return chosen


def _has_bf16(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of forward passes; it can be entered repeatedly."""
    if precision == "fp32":
        return nullcontext()
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    # With the cache, reentering the context would reuse casts of weights from before an update.
    return torch.autocast(device.type, dtype=kind, cache_enabled=False)


class GpuStepTimer:
    """Measures forward and backward passes of a copy of the model, with the first samples.

    Weights, buffers and random states of the run do not change. With a backend, steps are timed as
    CUDA graphs, on the current stream: the time of small models is otherwise that of launching
    their kernels.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        dataset: Dataset,
        device: torch.device,
        graphs: GraphBackend | None,
    ) -> None:
        self._config = config
        self._model = model
        self._dataset = dataset
        self._device = device
        self._graphs = graphs

    def __call__(self, formats: Sequence[Format]) -> Measurement:
        began = perf_counter()
        torch.cuda.init()
        with torch.cuda.device(self._device):
            before_bytes = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with seeded(self._config.seed):
                times, method, failures = self._measure(formats)
            memory_bytes = torch.cuda.max_memory_allocated() - before_bytes
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return Measurement(times, method, failures, perf_counter() - began, memory_bytes)

    def _measure(
        self, formats: Sequence[Format]
    ) -> tuple[dict[Format, float], str, dict[Format, str]]:
        steps: dict[Format, Callable[[], Tensor]] = {}
        failures: dict[Format, str] = {}
        models: dict[bool, nn.Module] = {}
        for one in formats:
            try:
                if one.channels_last not in models:
                    models[one.channels_last] = self._copy(one.channels_last)
                step = self._step(one, models[one.channels_last])
                # Libraries initialize in the first step.
                step()
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - a user's model may not support a format
                failures[one] = error_line(error)
            else:
                steps[one] = step
        method = "eager"
        runs: Mapping[Format, Callable[[], object]] = steps
        if self._graphs is not None and (replays := _capture(steps, self._graphs)):
            runs, method = replays, "cuda graph"
        times = interleave(runs, _time_steps) if runs else {}
        torch.cuda.synchronize()
        return times, method, failures

    def _copy(self, channels_last: bool) -> nn.Module:
        model = copy.deepcopy(self._model).to(self._device).train()
        if channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def _step(self, chosen: Format, model: nn.Module) -> Callable[[], Tensor]:
        samples = microbatch_samples(self._config, len(self._dataset.train))
        pipeline = EvaluationPipeline(
            self._dataset.train.head(samples),
            self._dataset.transform,
            samples,
            device=self._device,
            channels_last=chosen.channels_last,
        )
        inputs, targets = pipeline.gather(samples)
        context = autocast(chosen.precision, self._device)
        loss_in_training = loss_of(model, self._config.label_smoothing)

        def step() -> Tensor:
            model.zero_grad()
            with context:
                loss = loss_in_training(model, inputs, targets)
            loss.backward()
            return loss.detach()

        return step


def microbatch_samples(config: RunConfig, samples: int) -> int:
    """Return the number of samples in a forward pass of rank 0, with `samples` to train on."""
    shard, _ = rank_shard(min(config.global_batch_size, samples), config.share_weights, 0)
    own_samples: int = shard.stop - shard.start
    return -(-own_samples // min(config.accumulate, own_samples))


def interleave(
    steps: Mapping[Format, Callable[[], object]],
    time_steps: Callable[[Callable[[], object], int], float],
) -> dict[Format, float]:
    """Return the shortest step time of each format over several rounds of all formats.

    `time_steps(step, count)` returns the seconds of `count` steps. The clock rate of a GPU changes
    within seconds, so every round has all formats.
    """
    began = perf_counter()
    # The duration of the first step determines how many run in a round.
    times = {one: time_steps(step, 1) for one, step in steps.items()}
    counts = {
        one: max(1, min(MOST_STEPS, round(ROUND_SECONDS / max(seconds, 1e-9))))
        for one, seconds in times.items()
    }
    for _ in range(MOST_ROUNDS):
        for one, step in steps.items():
            times[one] = min(times[one], time_steps(step, counts[one]) / counts[one])
        if perf_counter() - began >= BUDGET_SECONDS:
            break
    return times


def _time_steps(step: Callable[[], object], count: int) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(count):
        step()
    ended.record()
    ended.synchronize()
    milliseconds: float = began.elapsed_time(ended)
    return milliseconds / 1000


def _capture(
    steps: Mapping[Format, Callable[[], Tensor]], backend: GraphBackend
) -> dict[Format, Callable[[], None]] | None:
    """Return the replay of each step; None if one cannot be captured, so that all run eagerly."""
    try:
        return {one: backend.capture(step)[0].replay for one, step in steps.items()}
    except Exception:  # noqa: BLE001 - a user's model may wait for the GPU, for instance
        torch.cuda.synchronize()
        return None
