"""Complete runs of real models: several workers match one worker up to rounding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.data.sampling import shard_bounds
from paceline.models.build import build_model
from paceline.strategies import STRATEGIES, create_strategy
from paceline.strategies.sync_batch_norm import convert_sync_batch_norm
from tests.strategies.contract.harness import (
    Connections,
    Task,
    build_replica,
    run_ranks,
    strategy_cases,
)
from tests.strategies.contract.real_runs import Run, distance, run
from tests.strategies.contract.test_strategies import keeps_equal
from tests.support.worker_pool import WorkerPool

ROUNDING = 1e-5
ROUNDING_OF_DOUBLES = 1e-10
"""A hundred times the difference of `vgg11` after twenty steps (docs/design-notes.md)."""

LENET: dict[str, Any] = {
    "model": "lenet",
    "train_samples": 50,
    "batch_size": 16,
    "iterations": 20,
    "lr": 0.02,
}
"""The last of four batches per epoch has two samples: fewer than workers."""

STORIES: dict[str, Any] = {
    **LENET,
    "model": "tests.support.user_code:NextToken",
    "data": "stories",
    "context": 24,
    "lr": 0.1,
}

VGG = Task(batches=(3, 1, *(2,) * 6), lr=0.01, momentum=0.9, weight_decay=5e-4)
"""The second batch has a sample for one of two workers only."""

SEEDING = Lock()
"""Workers may be threads, which share the default random generator."""

VARIANTS: dict[str, dict[str, Any]] = {
    "shares": {"shares": "2,1,1"},
    "parts": {"accumulate": 3, "clip_norm": 0.5},
    "channels_last": {"channels_last": True, "optimizer": "adam", "lr": 0.001},
}


SYNCHRONOUS = [name for name in STRATEGIES.names() if keeps_equal(name)]

ONE_OF_A_KIND = list({STRATEGIES.load(name): name for name in reversed(SYNCHRONOUS)}.values())
"""Each class once: presets differ only in the algorithm."""

_alone: dict[str, Run] = {}


def alone(pool: WorkerPool, folder: Path, settings: dict[str, Any]) -> Run:
    """The same run with one worker."""
    key = repr({name: value for name, value in settings.items() if name != "shares"})
    if key not in _alone:
        own = {**settings, "shares": ()}
        _alone[key] = run(pool, 1, folder, strategy="single", **own)[0]
    return _alone[key]


@pytest.mark.parametrize(("name", "workers"), strategy_cases(SYNCHRONOUS, (2, 4)))
def test_lenet_matches_one_worker(
    pool: WorkerPool, tmp_path: Path, name: str, workers: int
) -> None:
    expected = alone(pool, tmp_path, LENET)
    for own in run(pool, workers, tmp_path, strategy=name, **LENET):
        assert distance(own.weights, expected.weights) < ROUNDING


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("name", "workers"), strategy_cases(ONE_OF_A_KIND, (3,)))
def test_lenet_with_other_options_matches_one_worker(
    pool: WorkerPool, tmp_path: Path, name: str, workers: int, variant: str
) -> None:
    settings = {**LENET, **VARIANTS[variant]}
    expected = alone(pool, tmp_path, settings)
    for own in run(pool, workers, tmp_path, strategy=name, **settings):
        assert distance(own.weights, expected.weights) < ROUNDING


@pytest.mark.parametrize(("name", "workers"), strategy_cases(["allreduce", "overlap", "ddp"], (3,)))
def test_lenet_with_muon_matches_one_worker(
    pool: WorkerPool, tmp_path: Path, name: str, workers: int
) -> None:
    recipe = {"optimizer": "muon", "lr": 1e-3, "normalize": "image", "augment": "shift"}
    settings = {**LENET, **recipe}
    expected = alone(pool, tmp_path, settings)
    for own in run(pool, workers, tmp_path, strategy=name, **settings):
        assert distance(own.weights, expected.weights) < ROUNDING


@pytest.mark.parametrize("variant", ["shares", "parts"])
@pytest.mark.parametrize(("name", "workers"), strategy_cases(ONE_OF_A_KIND, (3,)))
def test_token_model_with_a_tied_head_matches_one_worker(
    pool: WorkerPool, tmp_path: Path, name: str, workers: int, variant: str
) -> None:
    settings = {**STORIES, **VARIANTS[variant]}
    expected = alone(pool, tmp_path, settings)
    for own in run(pool, workers, tmp_path, strategy=name, **settings):
        assert distance(own.weights, expected.weights) < ROUNDING


@pytest.mark.parametrize("shares", [(), ("2", "1", "1")], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", ["overlap", "parameter_server"])
def test_sync_batch_norm_has_the_statistics_of_one_worker(
    pool: WorkerPool, tmp_path: Path, name: str, shares: tuple[str, ...]
) -> None:
    """Statistics depend on the microbatches, so both runs normalize the same ones."""
    settings = {
        **LENET,
        "model": "tests.strategies.contract.normed:Normed",
        "sync_bn": True,
        "accumulate": 3,
    }
    expected = alone(pool, tmp_path, settings)
    in_one_part = alone(pool, tmp_path / "whole", {**settings, "accumulate": 1})
    assert distance(in_one_part.weights, expected.weights) > 100 * ROUNDING
    for own in run(pool, 3, tmp_path, strategy=name, shares=shares, **settings):
        assert distance(own.weights, expected.weights) < ROUNDING


@pytest.mark.parametrize(("name", "workers"), strategy_cases(ONE_OF_A_KIND, (2,)))
def test_vgg_with_sync_batch_norm_matches_one_worker(
    pool: WorkerPool, name: str, workers: int
) -> None:
    """Includes running statistics; a worker with an empty shard must not affect them."""
    for own in run_ranks(pool, workers, train_vgg, name, VGG):
        for key, expected in vgg_alone().items():
            apart = (own[key] - expected).abs().max() / expected.abs().max()
            assert apart < ROUNDING_OF_DOUBLES, key


@cache
def vgg_alone() -> dict[str, Tensor]:
    def work(communicator: Communicator) -> dict[str, Tensor]:
        return train_vgg(Connections(communicator), "single", VGG)

    return in_process.run(1, work)[0]


def train_vgg(connections: Connections, name: str, task: Task) -> dict[str, Tensor]:
    """Train in double precision: ReLUs and small batches amplify rounding errors."""
    with SEEDING:
        model: nn.Module = build_model("vgg11", (3, 32, 32), 10, seed=1).double()
    model = convert_sync_batch_norm(model, connections.communicator)
    strategy = create_strategy(name, {})
    strategy.setup(build_replica(model, connections, task))
    generator = torch.Generator().manual_seed(2)
    for samples in task.batches:
        inputs = torch.randn(samples, 3, 32, 32, generator=generator, dtype=torch.float64)
        labels = torch.randint(10, (samples,), generator=generator)
        replica = strategy.replica
        part = shard_bounds(
            samples, [1.0] * connections.communicator.world_size, connections.communicator.rank
        )
        weight = (part.stop - part.start) / samples
        replica.set_sample_counts(weight > 0)
        part = part if weight else slice(0, 1)
        loss = F.cross_entropy(replica.forward(inputs[part]), labels[part])
        strategy.backward(loss * weight)
        strategy.step()
    strategy.finish()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}
