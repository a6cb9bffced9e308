"""Loops that call paceline.join measure the gradient noise scale as `paceline train` does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.rank_info import SINGLE_PROCESS
from paceline.config import RunConfig
from paceline.measure.noise_scale import NoiseSample
from paceline.strategies import create_strategy
from paceline.training.session import Session

INPUTS = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))


def train(
    data: Any, batch_size: int | None, workers: int = 2
) -> list[tuple[str | None, list[NoiseSample]]]:
    """Train for an epoch; return for each rank why nothing was measured, and the samples."""

    def work(communicator: Communicator) -> tuple[str | None, list[NoiseSample]]:
        rank = communicator.rank
        rank_info = replace(
            SINGLE_PROCESS, rank=rank, world_size=workers, local_rank=rank, local_world_size=workers
        )
        config = RunConfig(strategy="allreduce", nproc_per_node=workers, noise_every=2)
        strategy = create_strategy("allreduce", {})
        session = Session(config, rank_info, communicator, strategy, torch.device("cpu"))
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches: Iterable[Any] = session.prepare(model, optimizer, data, batch_size=batch_size)[2]
        for batch in batches:
            inputs = batch[0] if isinstance(batch, list | tuple) else INPUTS[:4]
            session.backward(model(inputs).square().mean())
            session.step()
        session.finish()
        noise = strategy.replica.noise
        return noise.reason, list(noise.samples)

    return in_process.run(workers, work)


def test_shards_and_own_batches_are_measured_alike() -> None:
    sharded = train(TensorDataset(INPUTS), 8)
    assert sharded[0] == sharded[1]
    reason, samples = sharded[0]
    assert reason is None
    assert [each.iteration for each in samples] == [1, 3, 5]
    assert {(each.small_batch, each.batch) for each in samples} == {(4, 8)}
    assert all(each.small_square > each.square > 0 for each in samples)
    (reason, samples), _ = train([(INPUTS[:3],), (INPUTS[3:8],)], None)
    assert reason is None
    # Both ranks have the same batch here, so their gradients have no noise.
    assert [(each.small_batch, each.batch) for each in samples] == [(5, 10)]
    assert samples[0].small_square == pytest.approx(samples[0].square)


def test_nothing_is_measured_without_sample_counts_or_other_workers() -> None:
    (reason, samples), _ = train(["one batch", "another"], None)
    assert (reason, samples) == ("the numbers of samples are not known", [])
    ((reason, samples),) = train(TensorDataset(INPUTS), 8, workers=1)
    expected = "one worker without gradient accumulation has no smaller batches to compare with"
    assert (reason, samples) == (expected, [])
