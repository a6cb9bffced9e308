"""Models that bring their own loss, in every strategy: several workers match one, also resumed.

One has a loss and returns several outputs, the other returns its loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.data.sampling import shard_bounds
from paceline.strategies.strategy import Strategy
from paceline.training import run_state
from paceline.training.loss import loss_of
from tests.strategies.contract.harness import (
    Connections,
    Task,
    run_ranks,
    strategy_cases,
)
from tests.strategies.contract.real_runs import Run, distance, run
from tests.strategies.contract.regression import begin, saved_state
from tests.strategies.contract.test_models import (
    ONE_OF_A_KIND,
    ROUNDING_OF_DOUBLES,
    SYNCHRONOUS,
)
from tests.support.worker_pool import WorkerPool

FEATURES, VALUES = 6, 3


def surface() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Three values per sample."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(35, FEATURES, generator=generator)
    targets = (inputs @ torch.randn(FEATURES, VALUES, generator=generator)).tanh()
    return (inputs[:26], targets[:26]), (inputs[26:], targets[26:])


class Uncertain(nn.Module):
    """Predicts values and their variances; the loss uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 16, dtype=torch.float64)
        self.values = nn.Linear(16, VALUES, dtype=torch.float64)
        self.variances = nn.Linear(16, VALUES, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(inputs.double()).tanh()
        return self.values(hidden), F.softplus(self.variances(hidden))

    def loss(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        values, variances = outputs
        return F.gaussian_nll_loss(values, targets.double(), variances, eps=0.1)


class Computed(nn.Module):
    """Returns the loss with its predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 16, dtype=torch.float64)
        self.values = nn.Linear(16, VALUES, dtype=torch.float64)

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        values = self.values(self.body(inputs.double()).tanh())
        return {"loss": F.mse_loss(values, targets.double()), "logits": values}


MODELS = {"loss": Uncertain, "returned": Computed}


def first_value(outputs: Any, targets: Tensor) -> tuple[Tensor, int]:
    """Return the squared error of the first value, as a sum and a count."""
    values = outputs[0] if isinstance(outputs, tuple) else outputs
    return (values[:, 0] - targets[:, 0]).square().sum(), len(targets)


@dataclass(frozen=True)
class OwnTask(Task):
    batches: tuple[int, ...] = (5, 1, 3, *(6,) * 17)
    """The second batch has a sample for one of two workers only."""
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    accumulate: int = 2
    model: str = "loss"
    save_after: int | None = None
    """After this step, the state is saved and training continues with new objects."""


def train(connections: Connections, name: str, task: OwnTask) -> dict[str, Tensor]:
    """Return the final weights. Ranks start with different weights."""
    strategy = begin(
        MODELS[task.model](), connections, name, task, seed=connections.communicator.rank
    )
    generator = torch.Generator().manual_seed(2)
    for step, samples in enumerate(task.batches):
        if step == task.save_after:
            saved = saved_state(strategy)
            strategy.finish()
            strategy = begin(MODELS[task.model](), connections, name, task, seed=99)
            run_state.restore(saved, strategy.replica, strategy)
        inputs, targets = (torch.randn(samples, size, generator=generator, dtype=torch.float64)
                           for size in (FEATURES, VALUES))  # fmt: skip
        train_step(strategy, inputs, targets, task)
    strategy.finish()
    state = strategy.replica.model.state_dict()
    return {key: value.detach().clone() for key, value in state.items()}


def train_step(strategy: Strategy, inputs: Tensor, targets: Tensor, task: OwnTask) -> None:
    replica, samples = strategy.replica, len(inputs)
    world_size, rank = replica.communicator.world_size, replica.communicator.rank
    loss = loss_of(replica.model)
    part = shard_bounds(samples, [1.0] * world_size, rank)
    weight = (part.stop - part.start) / samples
    replica.begin_batch(part.stop - part.start, samples)
    rows = torch.arange(samples)[part if weight else slice(0, 1)]
    chunks = rows.tensor_split(min(task.accumulate, len(rows)))
    for number, chunk in enumerate(chunks, 1):
        replica.is_last_microbatch = number == len(chunks)
        value = loss(replica.forward, inputs[chunk], targets[chunk])
        strategy.backward(value * (weight * len(chunk) / len(rows)))
    strategy.step()


@cache
def alone(task: OwnTask) -> dict[str, Tensor]:
    def work(communicator: Communicator) -> dict[str, Tensor]:
        return train(Connections(communicator), "single", task)

    return in_process.run(1, work)[0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("name", "workers"), strategy_cases(SYNCHRONOUS, (2,)))
def test_own_loss_matches_one_worker(pool: WorkerPool, name: str, workers: int, model: str) -> None:
    task = OwnTask(model=model)
    expected = alone(task)
    for own in run_ranks(pool, workers, train, name, task):
        assert distance(own, expected) < ROUNDING_OF_DOUBLES


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("name", "workers"), strategy_cases(ONE_OF_A_KIND, (2,)))
def test_resumed_own_loss_is_bit_identical(
    pool: WorkerPool, name: str, workers: int, model: str
) -> None:
    task = OwnTask(model=model, batches=(4, 3, 4, 2, 4))
    straight = run_ranks(pool, workers, train, name, task)
    resumed = run_ranks(pool, workers, train, name, replace(task, save_after=2))
    for own, expected in zip(resumed, straight, strict=True):
        assert all(torch.equal(own[key], values) for key, values in expected.items())


def test_resumed_own_loss_with_a_codec_is_bit_identical(pool: WorkerPool) -> None:
    """DDP runs a first pass without side effects, so that its buckets are final."""
    for model in MODELS:
        task = OwnTask(model=model, batches=(4, 3, 4), options=(("codec", "fp16"),))
        straight = run_ranks(pool, 2, train, "ddp", task)
        resumed = run_ranks(pool, 2, train, "ddp", replace(task, save_after=1))
        for own, expected in zip(resumed, straight, strict=True):
            assert all(torch.equal(own[key], values) for key, values in expected.items())


# Complete runs

SETTINGS: dict[str, Any] = {
    "data": f"{__name__}:surface",
    "metrics": [f"{__name__}:first_value"],
    "test_samples": 9,
    "eval_batch_size": 2,
    "batch_size": 8,
    "iterations": 6,
    "lr": 0.05,
    "accumulate": 2,
    "clip_norm": 1.0,
}
"""The last of four batches per epoch has two samples: fewer than workers. Nine test samples are
evaluated in batches of one and two."""

_run_alone: dict[str, Run] = {}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("name", "workers"), strategy_cases(ONE_OF_A_KIND, (3,)))
def test_run_with_own_loss_and_metric_matches_one_worker(
    pool: WorkerPool, tmp_path: Path, name: str, workers: int, model: str
) -> None:
    settings = {**SETTINGS, "model": f"{__name__}:{MODELS[model].__name__}"}
    if model not in _run_alone:
        (_run_alone[model],) = run(pool, 1, tmp_path, strategy="single", **settings)
    expected = _run_alone[model]
    workers_of_run = run(pool, workers, tmp_path, strategy=name, **settings)
    for own in workers_of_run:
        assert distance(own.weights, expected.weights) < ROUNDING_OF_DOUBLES
    last, expected_last = (each.report.history[-1] for each in (workers_of_run[0], expected))
    assert last["test_accuracy"] is None
    assert last["metrics"].keys() == {"first_value"}
    for key in ("test_loss", "metrics"):
        assert last[key] == pytest.approx(expected_last[key], rel=ROUNDING_OF_DOUBLES)
