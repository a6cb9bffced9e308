"""Contract of strategies, checked for every registered one."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from paceline.comm import in_process
from paceline.comm.algorithms import ALGORITHMS
from paceline.comm.communicator import Communicator
from paceline.strategies import STRATEGIES, create_strategy
from tests.strategies.contract.harness import (
    Connections,
    Task,
    Trained,
    options_of,
    run_ranks,
    strategy_cases,
    train_exactly,
)
from tests.support.worker_pool import WorkerPool

TASKS = {
    "plain": Task(),
    "shares": Task(),
    "accumulated": Task(accumulate=3),
    "scaled": Task(loss_scale=16.0),
    "unused": Task(unused=True),
}
"""Tasks in which every synchronous strategy must match one worker exactly."""

UNEQUAL = (2.0, 1.0, 1.0, 4.0)
"""Batch weights by rank."""


def keeps_equal(name: str) -> bool:
    """Return whether all workers hold the same weights after every step."""
    strategy = create_strategy(name, options_of(name, Task()))
    return strategy.synchronous and strategy.replicas_equal


SYNCHRONOUS = strategy_cases(
    [name for name in STRATEGIES.names() if keeps_equal(name)], (1, 2, 3, 4)
)
ALL = strategy_cases(STRATEGIES.names(), (1, 2, 3, 4))


@cache
def trained_alone(task: Task) -> Trained:
    def work(communicator: Communicator) -> Trained:
        return train_exactly(Connections(communicator), "single", task)

    return in_process.run(1, work)[0]


def for_world_size(label: str, world_size: int) -> Task:
    task = TASKS[label]
    if label == "shares":
        return Task(shares=UNEQUAL[:world_size])
    return task


@pytest.mark.parametrize("label", TASKS)
@pytest.mark.parametrize(("name", "world_size"), SYNCHRONOUS)
def test_synchronous_strategies_match_one_worker(
    pool: WorkerPool, name: str, world_size: int, label: str
) -> None:
    alone = trained_alone(TASKS[label])
    trained = run_ranks(pool, world_size, train_exactly, name, for_world_size(label, world_size))
    for rank, worker in enumerate(trained):
        for step, (own, expected) in enumerate(
            zip(worker.after_each_step, alone.after_each_step, strict=True)
        ):
            assert torch.equal(own, expected), f"rank {rank} differs after step {step}"


@pytest.mark.parametrize("algorithm", ALGORITHMS.names())
def test_buckets_support_every_algorithm(pool: WorkerPool, algorithm: str) -> None:
    task = Task(options=(("algorithm", algorithm),))
    for rank, worker in enumerate(run_ranks(pool, 3, train_exactly, "overlap", task)):
        assert torch.equal(worker.final, trained_alone(Task()).final), f"rank {rank} differs"


@pytest.mark.parametrize(("name", "world_size"), SYNCHRONOUS)
def test_clipping_uses_the_norm_of_the_full_gradient(
    pool: WorkerPool, name: str, world_size: int
) -> None:
    task = Task(clip_norm=1.0)
    alone = trained_alone(task)
    assert not torch.equal(alone.final, trained_alone(Task()).final), "the task never clips"
    for worker in run_ranks(pool, world_size, train_exactly, name, task):
        torch.testing.assert_close(worker.final, alone.final, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "world_size"), ALL)
def test_all_workers_end_with_the_same_weights(
    pool: WorkerPool, name: str, world_size: int
) -> None:
    trained = run_ranks(pool, world_size, train_exactly, name, Task())
    for rank, worker in enumerate(trained):
        assert torch.equal(worker.final, trained[0].final), f"rank {rank} differs from rank 0"
        assert bool(worker.final.isfinite().all())
