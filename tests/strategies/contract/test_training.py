"""Every strategy learns and resumes, with every codec that it supports."""

from __future__ import annotations

import pytest
import torch

from paceline.compression import CODECS
from paceline.strategies import STRATEGIES
from tests.strategies.contract.harness import run_ranks, strategy_cases
from tests.strategies.contract.regression import Fitted, RegressionTask, fit
from tests.strategies.contract.test_strategies import keeps_equal
from tests.support.worker_pool import WorkerPool

CODEC_OPTIONS = {"topk": (("ratio", "0.25"),), "int8": (("chunk", "64"),)}
"""Options for gradients of a few hundred elements."""

CASES = [
    *((name, size, "none") for name, size in strategy_cases(STRATEGIES.names(), (1, 3))),
    *((name, 3, codec) for name in ("allreduce", "overlap", "ddp") for codec in CODECS.names()[1:]),
]


def make_task(codec: str, steps: int, save_after: int | None = None) -> RegressionTask:
    options: tuple[tuple[str, str], ...] = ()
    if codec != "none":
        options = (("codec", codec), *CODEC_OPTIONS.get(codec, ()))
    return RegressionTask(steps=steps, save_after=save_after, options=options)


def trained(pool: WorkerPool, name: str, world_size: int, task: RegressionTask) -> list[Fitted]:
    return run_ranks(pool, world_size, fit, name, task)


@pytest.mark.parametrize(("name", "world_size", "codec"), CASES)
def test_loss_falls_and_equal_replicas_stay_equal(
    pool: WorkerPool, name: str, world_size: int, codec: str
) -> None:
    workers = trained(pool, name, world_size, make_task(codec, steps=40))
    for rank, worker in enumerate(workers):
        assert worker.losses[-1] < worker.losses[0] / 2, f"rank {rank} has not learned"
    if not keeps_equal(name):
        return
    for step, weights in enumerate(zip(*(each.after_each_step for each in workers), strict=True)):
        for rank, own in enumerate(weights):
            assert torch.equal(own, weights[0]), f"rank {rank} left rank 0 in step {step}"


@pytest.mark.parametrize(("name", "world_size", "codec"), CASES)
def test_resumed_training_is_bit_identical(
    pool: WorkerPool, name: str, world_size: int, codec: str
) -> None:
    straight = trained(pool, name, world_size, make_task(codec, steps=7))
    resumed = trained(pool, name, world_size, make_task(codec, steps=7, save_after=3))
    for rank, (one, other) in enumerate(zip(straight, resumed, strict=True)):
        for step, (own, expected) in enumerate(
            zip(other.after_each_step, one.after_each_step, strict=True)
        ):
            assert torch.equal(own, expected), f"rank {rank} differs after step {step}"
