"""A model whose layers wait as long as those of a real one computed, and need no CPU for that.

A machine has too few cores to compute for all nodes of an emulated cluster. `record_times` measures
each layer of a registered model on one idle core, and `replayed` builds a model with the same
weights, whose layers sleep for these times and have gradients of zero. So nodes use the CPU for
communication, updates and data only, as if each had an accelerator.

    paceline train --model common.replayed_model:replayed --model-options times=FILE ...
"""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor, autograd, nn
from torch.nn import functional as F

from paceline.models import MODELS

FIRST_STEPS = 3
"""Not recorded: they allocate memory."""
MOST_STEPS, RECORD_SECONDS = 40, 4.0
"""Of the recorded steps of each batch size."""
PR_SET_TIMERSLACK = 29


def layers(model: nn.Module) -> list[nn.Module]:
    """Modules with weights of their own, in the order of their definition."""
    return [one for one in model.modules() if any(True for _ in one.parameters(recurse=False))]


def record_times(
    file: Path,
    model: str,
    options: Mapping[str, Any],
    sample_shape: Sequence[int],
    classes: int,
    batches: Sequence[int],
) -> None:
    """Write the times of forward and backward passes by batch size, step and layer."""
    torch.set_num_threads(1)
    built = MODELS.load(model)(tuple(sample_shape), classes, **options)
    recorder = _Recorder(built)
    steps = {}
    for batch in batches:
        inputs = torch.randn(batch, *sample_shape)
        labels = torch.randint(classes, (batch,))
        for _ in range(FIRST_STEPS):
            recorder.step(inputs, labels)
        steps[batch], began = [recorder.step(inputs, labels)], perf_counter()
        while len(steps[batch]) < MOST_STEPS and perf_counter() - began < RECORD_SECONDS:
            steps[batch].append(recorder.step(inputs, labels))
    job = {"model": model, "options": dict(options), "steps": steps}
    file.write_text(json.dumps(job))


class _Recorder:
    """Takes the time from the end of each layer to the end of the next one.

    What is before a layer, such as an activation, counts as a part of it, and what is behind the
    last one, such as the loss, as a part of that.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._layers = model, layers(model)
        self._began = 0.0
        self._forward = [0.0] * len(self._layers)
        self._backward = [0.0] * len(self._layers)
        for number, layer in enumerate(self._layers):
            layer.register_forward_hook(lambda *_, n=number: self._mark(self._forward, n))
            for weight in layer.parameters(recurse=False):
                weight.register_post_accumulate_grad_hook(
                    lambda _, n=number: self._mark(self._backward, n)
                )

    def _mark(self, times: list[float], number: int) -> None:
        now = perf_counter()
        times[number] += now - self._began
        self._began = now

    def step(self, inputs: Tensor, labels: Tensor) -> list[list[float]]:
        count = len(self._layers)
        self._forward[:] = self._backward[:] = [0.0] * count
        self._began = perf_counter()
        loss = F.cross_entropy(self._model(inputs), labels)
        self._mark(self._forward, count - 1)
        loss.backward()
        self._mark(self._backward, 0)
        self._model.zero_grad()
        return [list(self._forward), list(self._backward)]


class _Sleeper:
    """Sleeps for given times on average: a sleep that took too long makes the next one shorter."""

    def __init__(self) -> None:
        self._late = 0.0

    def sleep(self, seconds: float) -> None:
        wanted = seconds - self._late
        if wanted <= 0:
            self._late = -wanted
            return
        began = perf_counter()
        sleep(wanted)
        self._late = perf_counter() - began - wanted


class _Layer(autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sleeper: _Sleeper, forward: float, backward: float, *weights: Tensor
    ) -> Tensor:
        ctx.sleeper, ctx.backward_seconds = sleeper, backward
        ctx.save_for_backward(*weights)
        sleeper.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.sleeper.sleep(ctx.backward_seconds)
        return gradient, None, None, None, *map(torch.zeros_like, ctx.saved_tensors)


class Replayed(nn.Module):
    """Has the weights of `model`, and waits for the times of a recorded step, chosen at random."""

    def __init__(
        self, model: nn.Module, classes: int, steps: Mapping[int, Sequence[Sequence[Any]]]
    ) -> None:
        super().__init__()
        self.model, self._classes, self._steps = model, classes, steps
        self._weights = [tuple(one.parameters(recurse=False)) for one in layers(model)]
        self._sleeper = _Sleeper()
        self._random = random.Random()  # each worker has its own

    def forward(self, inputs: Tensor) -> Tensor:
        recorded = self._steps.get(len(inputs)) or self._steps[max(self._steps)]
        forward, backward = self._random.choice(recorded)
        x = torch.zeros(len(inputs), self._classes)
        for times in zip(forward, backward, self._weights, strict=True):
            x = _Layer.apply(x, self._sleeper, *times[:2], *times[2])  # type: ignore[no-untyped-call]
        return x


def replayed(sample_shape: tuple[int, ...], classes: int, *, times: str) -> Replayed:
    """Build the model whose times are in the file `times`."""
    job = json.loads(Path(times).read_text())
    # By default, Linux lets sleeps take 50 us longer.
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
    model = MODELS.load(job["model"])(tuple(sample_shape), classes, **job["options"])
    steps = {int(batch): recorded for batch, recorded in job["steps"].items()}
    return Replayed(model, classes, steps)
