"""Batch weights: fixed, by speed, and with workers slowed by `--slow`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.config import from_mapping
from paceline.data.sampling import shard_bounds
from paceline.strategies.replica import synchronize_buffers
from paceline.strategies.strategy import Strategy
from paceline.training.coordination import StepCoordinator, follow
from tests.strategies.contract.harness import Connections, Task, build_replica
from tests.strategies.contract.real_runs import distance, run
from tests.support.worker_pool import WorkerPool


def test_fixed_weights_split_batches_in_proportion(pool: WorkerPool, tmp_path: Path) -> None:
    settings = {"train_samples": 48, "batch_size": 16, "epochs": 2, "model": "softmax"}
    runs = run(pool, 3, tmp_path, strategy="allreduce", shares="2,1,1", **settings)
    assert [each.report.worker["samples"] for each in runs] == [48, 24, 24]


def test_speed_weights_move_samples_to_the_fast_worker_and_keep_the_result(
    pool: WorkerPool, tmp_path: Path
) -> None:
    settings = {"model": "lenet", "train_samples": 64, "batch_size": 16, "iterations": 24}
    [alone] = run(pool, 1, tmp_path, **settings)
    quick, slow = run(
        pool, 2, tmp_path, strategy="allreduce", shares="auto", slow="1=10", **settings
    )
    samples = [each.report.worker["samples"] for each in (quick, slow)]
    assert sum(samples) == 24 * 16
    assert samples[0] > samples[1] > 0
    for own in (quick, slow):
        assert distance(own.weights, alone.weights) < 1e-5


def test_worker_without_samples_keeps_its_weight() -> None:
    assert follow([2.0, 2.0, 0.04], [30.0, 10.0, 0.0]) == [30.0, 10.0, pytest.approx(0.4)]
    assert follow([1.0, 1.0], [0.0, 0.0]) == [1.0, 1.0]


def agree_on_weights(communicator: Communicator, shares: str) -> list[float]:
    """Return the weights agreed by workers that are each half as fast as the previous one."""
    config = from_mapping({"nproc_per_node": communicator.world_size, "shares": shares})
    replica = build_replica(nn.Linear(1, 1), Connections(communicator), Task())
    strategy = Strategy()
    strategy.setup(replica)
    coordinator = StepCoordinator(config, strategy, replica)
    coordinator.start()
    replica.clock.seconds["forward"] += 1.0 * 2**communicator.rank
    replica.clock.seconds["backward"] += 3.0 * 2**communicator.rank
    # Waiting does not count as slow.
    replica.clock.seconds["wait"] += 100.0 * communicator.rank
    coordinator.after_step(seconds=20.0, samples=40, stop=False)
    return coordinator.shares


def test_weights_follow_the_measured_speed_and_are_equal_on_all_workers() -> None:
    first, *others = in_process.run(3, lambda communicator: agree_on_weights(communicator, "auto"))
    assert [each / first[0] for each in first] == pytest.approx([1.0, 0.5, 0.25])
    assert all(each == first for each in others)


def test_fixed_weights_do_not_change() -> None:
    for own in in_process.run(3, lambda communicator: agree_on_weights(communicator, "1,1,2")):
        assert own == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("samples", [1, 2, 16, 17, 1000])
def test_every_sample_is_assigned_once_for_any_weights(samples: int) -> None:
    weights = [1.0, 0.5, 0.25 / 3]
    assigned = [list(range(samples))[shard_bounds(samples, weights, rank)] for rank in range(3)]
    assert [sample for part in assigned for sample in part] == list(range(samples))


def test_slow_option_delays_a_worker_by_its_factor(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the requested sleep, which is not performed."""
    naps: list[float] = []
    monkeypatch.setattr("paceline.training.step.time.sleep", naps.append)
    settings = {"train_samples": 64, "batch_size": 16, "iterations": 8, "model": "lenet"}
    [alone] = run(pool, 1, tmp_path, slow="0=3", **settings)
    phases = alone.report.worker["phases"]
    assert len(naps) == 8
    # A factor of three adds twice the compute time, except for the last backward pass.
    assert sum(naps) <= 2 * (phases["forward"] + phases["backward"])
    assert sum(naps) >= 2 * phases["forward"]


class Counting(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.norm.running_mean = torch.tensor([1.0, 2.0]) * (rank + 1)
        self.norm.num_batches_tracked = torch.tensor(10 + rank)


@pytest.mark.parametrize(
    ("how", "mean"), [("rank0", [1.0, 2.0]), ("average", [2.0, 4.0])], ids=["rank0", "average"]
)
def test_buffers_are_averaged_or_taken_from_rank_0(how: str, mean: list[float]) -> None:
    def work(communicator: Communicator) -> tuple[list[float], int]:
        model = Counting(communicator.rank)
        synchronize_buffers(model, communicator, how)
        assert model.norm.running_mean is not None
        return model.norm.running_mean.tolist(), int(model.norm.num_batches_tracked or 0)

    assert in_process.run(3, work) == [(mean, 10)] * 3


def test_integer_buffers_are_taken_from_rank_0() -> None:
    def work(communicator: Communicator) -> int:
        model = nn.Module()
        model.register_buffer("steps", torch.tensor(5 + communicator.rank))
        synchronize_buffers(model, communicator, "average")
        return int(model.get_buffer("steps"))

    assert in_process.run(2, work) == [5, 5]
