"""Local SGD: averaging of weights and optimizer state, evaluation and resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.cost import Network
from paceline.config import from_mapping
from paceline.errors import ConfigError
from paceline.launch import launcher
from paceline.strategies.gradient_averaging import GradientAveraging
from paceline.strategies.local_sgd import LocalSgd
from paceline.strategies.strategy import ModelShape, Strategy
from tests.support import toy_replicas as toy


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_averaging_after_every_sgd_step_equals_gradient_averaging(workers: int) -> None:
    local = toy.trained(workers, lambda: LocalSgd(every=1), 6, toy.sgd())
    averaged = toy.trained(workers, GradientAveraging, 6, toy.sgd())
    torch.testing.assert_close(local[0], averaged[0])


def test_unequal_shards_are_weighted_by_samples() -> None:
    shares = [1.0, 3.0]
    local = toy.trained(2, lambda: LocalSgd(every=1), 6, toy.sgd(), shares)
    averaged = toy.trained(2, GradientAveraging, 6, toy.sgd(), shares)
    torch.testing.assert_close(local[0], averaged[0])


@pytest.mark.parametrize("optimizer", [toy.sgd(), toy.adam()], ids=["sgd", "adam"])
def test_warm_up_steps_average_gradients_for_any_optimizer(
    optimizer: toy.MakeOptimizer,
) -> None:
    local = toy.trained(2, lambda: LocalSgd(every=3, warmup=5), 5, optimizer)
    averaged = toy.trained(2, lambda: GradientAveraging(flat=True), 5, optimizer)
    assert torch.equal(local[0], averaged[0])


def test_replicas_are_equal_only_after_averaging() -> None:
    def differ(steps: int) -> bool:
        one, other = toy.trained(
            2, lambda: LocalSgd(every=3, warmup=1), steps, toy.sgd(), finish=False
        )
        return not torch.equal(one, other)

    assert [differ(steps) for steps in range(1, 8)] == [False, True, True, False, True, True, False]


def state_after(strategy: Strategy, name: str) -> list[Tensor]:
    optimizer = strategy.replica.optimizer
    return [optimizer.state[weight][name] for weight in strategy.replica.trainable]


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [(toy.sgd(), "momentum_buffer"), (toy.adam(), "exp_avg"), (toy.adam(), "exp_avg_sq")],
)
def test_optimizer_state_is_averaged(optimizer: toy.MakeOptimizer, name: str) -> None:
    def work(communicator: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        strategy = LocalSgd(every=2)
        strategy.setup(toy.replica(communicator, optimizer))
        toy.train(strategy, range(1))
        # The second step adds to the state of the first, so both are computed here as a reference.
        alone = LocalSgd(every=100)
        alone.setup(toy.replica(communicator, optimizer))
        toy.train(alone, range(2))
        toy.train(strategy, range(1, 2))
        return state_after(strategy, name), state_after(alone, name)

    (mean, one), (_, other) = in_process.run(2, work)
    for got, first, second in zip(mean, one, other, strict=True):
        torch.testing.assert_close(got, (first + second) / 2)


def test_evaluation_uses_the_mean_and_restores_local_weights() -> None:
    def work(communicator: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        strategy = LocalSgd(every=100)
        strategy.setup(toy.replica(communicator, toy.sgd()))
        toy.train(strategy, range(3))
        before = toy.weights_of(strategy.replica)
        with strategy.eval_weights():
            inside = toy.weights_of(strategy.replica)
        return before, inside, toy.weights_of(strategy.replica)

    results = in_process.run(2, work)
    mean = (results[0][0] + results[1][0]) / 2
    for before, inside, after in results:
        torch.testing.assert_close(inside, mean)
        assert torch.equal(before, after)
        assert not torch.equal(before, inside)


def test_every_replica_ends_with_the_mean() -> None:
    ends = toy.trained(3, lambda: LocalSgd(every=4), 5, toy.sgd())
    raw = toy.trained(3, lambda: LocalSgd(every=4), 5, toy.sgd(), finish=False)
    assert all(torch.equal(end, ends[0]) for end in ends)
    torch.testing.assert_close(ends[0], sum(raw) / torch.tensor(3.0))


@pytest.mark.parametrize("cut", range(1, 7))
def test_resumed_training_is_bit_identical(cut: int) -> None:
    assert toy.resumes_exactly(lambda: LocalSgd(every=3, warmup=2), cut, 9)


@pytest.mark.usefixtures("warm_workers")
def test_resumed_run_of_processes_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Resumes from the checkpoint after step 4, between two averaging steps."""
    settings: dict[str, Any] = {
        "strategy": "local_sgd", "options": {"every": "3"}, "nproc_per_node": 2, "iterations": 7,
        "train_samples": 64, "test_samples": 32, "batch_size": 16, "threads": 1,
        "sample_seconds": 0, "tensorboard": False, "eval_every": "never", "out": str(tmp_path),
    }  # fmt: skip
    whole = launcher.train(from_mapping({**settings, "checkpoint_every": 4}), quiet=True)
    again = launcher.resume(str(whole.folder.path), {"iterations": 7}, quiet=True)
    assert whole.result is not None
    assert again.result is not None
    assert again.result["weights_sha256"] == whole.result["weights_sha256"]


@pytest.mark.parametrize(("option", "value"), [("every", 0), ("warmup", -1)])
def test_invalid_options_are_rejected(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"-o {option}: must be at least"):
        LocalSgd(**{option: value})  # type: ignore[arg-type]  # as given on the command line


def test_cost_falls_with_the_averaging_interval() -> None:
    shape = ModelShape(workers=4, tensor_bytes=(4_000_000,))
    network = Network(latency_seconds=1e-4, bandwidth_bytes_per_second=1e9)
    one, eight = (LocalSgd(every=every).cost(shape, network).seconds for every in (1, 8))
    assert math.isclose(one / eight, 8)
