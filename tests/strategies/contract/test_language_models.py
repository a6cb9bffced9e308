"""GPT in every strategy: several workers match one, and resumed training matches uninterrupted.

The embedding is also the head, so each backward pass uses it twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.compression import CODECS
from paceline.config import from_mapping
from paceline.data.sampling import shard_bounds
from paceline.measure.memory import allocated_bytes
from paceline.models.build import build_model
from paceline.models.gpt import GPT
from paceline.strategies import STRATEGIES, create_strategy
from paceline.strategies.shared.gradients import EARLY_PUBLISH_BYTES
from paceline.strategies.strategy import Strategy
from paceline.training import run_state
from paceline.training.loss import cross_entropy
from paceline.training.optimizer import build_optimizer
from tests.strategies.contract.harness import (
    Connections,
    Task,
    build_replica,
    options_of,
    run_ranks,
    strategy_cases,
)
from tests.strategies.contract.real_runs import Run, distance, run
from tests.strategies.contract.regression import saved_state
from tests.strategies.contract.test_models import (
    ONE_OF_A_KIND,
    ROUNDING,
    ROUNDING_OF_DOUBLES,
    SEEDING,
    SYNCHRONOUS,
)
from tests.support.worker_pool import WorkerPool

LENGTH, VOCABULARY = 12, 32


@dataclass(frozen=True)
class GptTask(Task):
    batches: tuple[int, ...] = (4, 1, 3, *(4,) * 17)
    """The second batch has a sample for one of two workers only."""
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    optimizer: str = "sgd"
    vocabulary: int = VOCABULARY
    model_options: tuple[tuple[str, str], ...] = ()
    dtype: torch.dtype = torch.float64
    save_after: int | None = None
    """After this step, the state is saved and training continues with new objects."""
    before: str = ""
    """Strategy of the first steps, if another one resumes."""

    def make_optimizer(
        self, weights: Iterable[nn.Parameter], undecayed: Iterable[nn.Parameter] = ()
    ) -> Optimizer:
        keys = ("optimizer", "lr", "momentum", "weight_decay")
        config = from_mapping({key: getattr(self, key) for key in keys})
        return build_optimizer(config, weights, undecayed)


ADAMW = GptTask(optimizer="adamw", lr=1e-3, weight_decay=0.1)


def begin(connections: Connections, name: str, task: GptTask, seed: int) -> Strategy:
    with SEEDING:
        model = build_model(
            "gpt-nano",
            (LENGTH,),
            task.vocabulary,
            seed,
            options=dict(task.model_options),
            has_tokens=True,
        ).to(task.dtype)
    assert isinstance(model, GPT)
    optimizer = task.make_optimizer(model.parameters(), model.undecayed_weights())
    assert len(optimizer.param_groups) == 2
    strategy = create_strategy(name, options_of(name, task))
    strategy.setup(build_replica(model, connections, task, optimizer))
    return strategy


def train(connections: Connections, name: str, task: GptTask) -> dict[str, Tensor]:
    """Return the final weights. Ranks start with different weights."""
    strategy = begin(connections, task.before or name, task, seed=connections.communicator.rank)
    generator = torch.Generator().manual_seed(2)
    for step, samples in enumerate(task.batches):
        if step == task.save_after:
            saved = saved_state(strategy)
            strategy.finish()
            strategy = begin(connections, name, task, seed=99)
            run_state.restore(saved, strategy.replica, strategy)
        windows = torch.randint(task.vocabulary, (samples, LENGTH + 1), generator=generator)
        train_step(strategy, windows, task)
    strategy.finish()
    state = strategy.replica.model.state_dict()
    return {key: value.detach().clone() for key, value in state.items()}


def train_step(strategy: Strategy, windows: Tensor, task: GptTask) -> None:
    replica, samples = strategy.replica, len(windows)
    world_size, rank = replica.communicator.world_size, replica.communicator.rank
    part = shard_bounds(samples, [1.0] * world_size, rank)
    weight = (part.stop - part.start) / samples
    replica.begin_batch(part.stop - part.start, samples)
    own = windows[part if weight else slice(0, 1)]
    chunks = own.tensor_split(min(task.accumulate, len(own)))
    for number, chunk in enumerate(chunks, 1):
        replica.is_last_microbatch = number == len(chunks)
        loss = cross_entropy(replica.forward(chunk[:, :-1]), chunk[:, 1:])
        strategy.backward(loss * (weight * len(chunk) / len(own)))
    strategy.step()


@cache
def alone(task: GptTask) -> dict[str, Tensor]:
    task = replace(task, before="", save_after=None, options=())

    def work(communicator: Communicator) -> dict[str, Tensor]:
        return train(Connections(communicator), "single", task)

    return in_process.run(1, work)[0]


def assert_matches_one_worker(pool: WorkerPool, name: str, workers: int, task: GptTask) -> None:
    expected = alone(task)
    for own in run_ranks(pool, workers, train, name, task):
        assert own.keys() == expected.keys()
        for key, values in expected.items():
            apart = (own[key] - values).abs().max() / values.abs().max()
            assert apart < ROUNDING_OF_DOUBLES, key


@pytest.mark.parametrize(("name", "workers"), strategy_cases(SYNCHRONOUS, (2,)))
def test_gpt_matches_one_worker(pool: WorkerPool, name: str, workers: int) -> None:
    assert len(GptTask().batches) == 20
    assert_matches_one_worker(pool, name, workers, GptTask())


@pytest.mark.parametrize(("name", "workers"), strategy_cases(ONE_OF_A_KIND, (2, 3)))
def test_gpt_with_weight_decay_matches_one_worker(
    pool: WorkerPool, name: str, workers: int
) -> None:
    assert_matches_one_worker(pool, name, workers, ADAMW)


@pytest.mark.parametrize(("name", "workers"), strategy_cases(["allreduce", "overlap", "ddp"], (2,)))
def test_gpt_with_muon_matches_one_worker(pool: WorkerPool, name: str, workers: int) -> None:
    task = GptTask(optimizer="muon", lr=1e-3, weight_decay=0.1, batches=(4,) * 5)
    # Matrices are orthogonalized in float32.
    expected = alone(task)
    for own in run_ranks(pool, workers, train, name, task):
        for key, values in expected.items():
            assert (own[key] - values).abs().max() < 1e-5 * values.abs().max(), key


@pytest.mark.parametrize(("name", "workers"), strategy_cases(ONE_OF_A_KIND, (2,)))
def test_gpt_with_recomputed_activations_and_accumulation_matches_one_worker(
    pool: WorkerPool, name: str, workers: int
) -> None:
    task = GptTask(accumulate=2, model_options=(("checkpoint", "true"),))
    assert_matches_one_worker(pool, name, workers, task)


@pytest.mark.parametrize(("name", "workers"), strategy_cases(ONE_OF_A_KIND, (2,)))
def test_large_tied_embedding_is_exchanged_once_per_step(
    pool: WorkerPool, name: str, workers: int
) -> None:
    """Strategies raise if a weight gets a second gradient after its exchange began."""
    task = GptTask(vocabulary=4096, batches=(4,) * 3)
    assert task.vocabulary * 48 * 8 > EARLY_PUBLISH_BYTES
    assert_matches_one_worker(pool, name, workers, task)


def assert_resumes(pool: WorkerPool, name: str, workers: int, task: GptTask) -> None:
    task = replace(task, batches=(4, 3, 4, 2, 4), dtype=torch.float32)
    straight = run_ranks(pool, workers, train, name, task)
    resumed = run_ranks(pool, workers, train, name, replace(task, save_after=2))
    for rank, (own, expected) in enumerate(zip(resumed, straight, strict=True)):
        for key, values in expected.items():
            assert torch.equal(own[key], values), f"rank {rank}: {key}"


@pytest.mark.parametrize(("name", "workers"), strategy_cases(STRATEGIES.names(), (2,)))
def test_resumed_gpt_is_bit_identical(pool: WorkerPool, name: str, workers: int) -> None:
    assert_resumes(pool, name, workers, GptTask())


@pytest.mark.parametrize(("name", "workers"), strategy_cases(ONE_OF_A_KIND, (2,)))
def test_resumed_gpt_with_weight_decay_is_bit_identical(
    pool: WorkerPool, name: str, workers: int
) -> None:
    assert_resumes(pool, name, workers, ADAMW)


@pytest.mark.parametrize(
    ("before", "after"),
    [("sharded", "fsdp"), ("fsdp", "shared"), ("allreduce", "sharded")],
)
def test_another_strategy_resumes_gpt(pool: WorkerPool, before: str, after: str) -> None:
    assert_matches_one_worker(pool, after, 2, replace(ADAMW, before=before, save_after=7))


def test_parameter_servers_resume_gpt_from_another_strategy(pool: WorkerPool) -> None:
    """The optimizer has the weights in another order than the model."""
    task = GptTask(before="allreduce", save_after=7)
    assert_matches_one_worker(pool, "parameter_server", 2, task)


@pytest.mark.parametrize("servers", ["2", "3"])
def test_several_parameter_servers_decay_the_same_weights(pool: WorkerPool, servers: str) -> None:
    """Of three servers, one decays all of its weights, one some of them, and one none."""
    task = replace(ADAMW, options=(("servers", servers),), vocabulary=1024, batches=(4,) * 5)
    assert_matches_one_worker(pool, "parameter_server", 2, task)
    assert_resumes(pool, "parameter_server", 2, task)


# Complete runs

STORIES: dict[str, Any] = {
    "model": "gpt-nano",
    "data": "stories",
    "context": 16,
    "train_samples": 26,
    "test_samples": 9,
    "batch_size": 8,
    "iterations": 6,
    "lr": 0.05,
    "accumulate": 2,
    "clip_norm": 1.0,
}
"""The last of four batches per epoch has two samples: fewer than workers."""

_run_alone: list[Run] = []


@pytest.mark.parametrize(("name", "workers"), strategy_cases(ONE_OF_A_KIND, (3,)))
def test_run_on_stories_matches_one_worker(
    pool: WorkerPool, tmp_path: Path, name: str, workers: int
) -> None:
    if not _run_alone:
        _run_alone.extend(run(pool, 1, tmp_path, strategy="single", **STORIES))
    expected = _run_alone[0]
    workers_of_run = run(pool, workers, tmp_path, strategy=name, **STORIES)
    for own in workers_of_run:
        assert distance(own.weights, expected.weights) < ROUNDING
    loss, expected_loss = (
        each.report.history[-1]["test_loss"] for each in (workers_of_run[0], expected)
    )
    assert loss == pytest.approx(expected_loss, rel=ROUNDING)


LEARNING: dict[str, Any] = {**STORIES, "train_samples": 64, "iterations": 24, "lr": 0.1}
UNIFORM_LOSS = 5.5
"""Of equal probabilities for 256 bytes, about the loss of the first step."""


@pytest.mark.parametrize("codec", [name for name in CODECS.names() if name != "none"])
def test_gpt_learns_with_every_codec(pool: WorkerPool, tmp_path: Path, codec: str) -> None:
    first, second = run(
        pool, 2, tmp_path, strategy="allreduce", options={"codec": codec}, **LEARNING
    )
    assert first.report.history[-1]["test_loss"] < 0.8 * UNIFORM_LOSS
    for key, values in first.weights.items():
        assert torch.equal(values, second.weights[key]), key


@pytest.mark.parametrize("name", [name for name in STRATEGIES.names() if name not in SYNCHRONOUS])
def test_gpt_learns_with_strategies_that_let_replicas_differ(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    for own in run(pool, 2, tmp_path, strategy=name, **LEARNING):
        assert own.report.status == "finished", own.report.cause
        assert own.report.history[-1]["test_loss"] < 0.8 * UNIFORM_LOSS


def test_parameter_servers_train_gpt_asynchronously(pool: WorkerPool, tmp_path: Path) -> None:
    settings = {**LEARNING, "momentum": 0, "accumulate": 1, "clip_norm": None}
    mode = {"mode": "async"}
    first, _ = run(pool, 2, tmp_path, strategy="parameter_server", options=mode, **settings)
    assert first.report.history[-1]["test_loss"] < 0.8 * UNIFORM_LOSS


MICRO: dict[str, Any] = {
    **STORIES,
    "model": "gpt-micro",
    "context": 8,
    "train_samples": 32,
    "iterations": 4,
    "optimizer": "adamw",
    "lr": 1e-3,
    "accumulate": 1,
    "clip_norm": None,
}


def weight_bytes(own: Run) -> int:
    return sum(weight.nbytes for weight in own.weights.values())


@pytest.mark.parametrize(
    ("name", "passes"),
    [("allreduce", 2), ("overlap", 2), ("ddp", 2), ("sharded", 2), ("fsdp", 3)],
)
def test_step_sends_the_bytes_of_its_collectives(
    pool: WorkerPool, tmp_path: Path, name: str, passes: int
) -> None:
    """A reduce-scatter or all-gather sends (P - 1) / P of the weights; an all-reduce is both."""
    for own in run(pool, 2, tmp_path, strategy=name, **MICRO):
        later = own.report.worker["after_first"]
        sent = later["bytes_sent"]["gradients"] + later["bytes_sent"]["parameters"]
        expected = passes * weight_bytes(own) / 2
        if name == "fsdp":
            # The embedding belongs to no block and is gathered once.
            expected -= own.weights["embedding"].nbytes / 2
        assert sent / later["iterations"] == pytest.approx(expected, rel=0.002)


@pytest.mark.skipif(allocated_bytes() is None, reason="needs glibc 2.33")
def test_sharded_optimizer_state_takes_half_the_memory(tmp_path: Path) -> None:
    held = {}
    for name in ("allreduce", "sharded"):
        # In processes of their own: buffers of earlier runs would be reused, or freed meanwhile.
        with WorkerPool(2) as pool:
            first, second = run(pool, 2, tmp_path, strategy=name, **MICRO)
        # After the update, a thread may still hold the buffer of the last transfer.
        held[name] = [own.report.worker["memory"]["backward_bytes"] for own in (first, second)]
    # AdamW has two values per weight, of which a worker then holds half.
    for whole, sharded in zip(held["allreduce"], held["sharded"], strict=True):
        assert whole - sharded == pytest.approx(weight_bytes(first), rel=0.1)
