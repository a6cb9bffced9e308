"""Each rank restores its own state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.strategies.gradient_averaging import GradientAveraging
from paceline.training import run_state
from paceline.training.run_state import Progress
from tests.support import toy_replicas as toy


def normed(communicator: Communicator) -> GradientAveraging:
    """Attached; with batch norm in front of the toy's own layers."""
    replica = toy.replica(communicator, toy.sgd())
    assert isinstance(replica.model, nn.Sequential)
    replica.model.insert(0, nn.BatchNorm1d(toy.FEATURES, affine=False))
    strategy = GradientAveraging()
    strategy.setup(replica)
    return strategy


def test_each_rank_restores_its_batch_norm_statistics() -> None:
    saved: list[dict[str, Any]] = []

    def work(communicator: Communicator) -> tuple[Tensor, Tensor]:
        strategy = normed(communicator)
        toy.train(strategy, range(2))
        gathered = run_state.gather(strategy.replica, strategy, Progress(), {})
        if gathered is not None:
            saved.append(gathered)
        communicator.barrier().wait()
        resumed = normed(communicator)
        run_state.restore(saved[0], resumed.replica, resumed)
        means = [own.replica.model.state_dict()["0.running_mean"] for own in (strategy, resumed)]
        return means[0], means[1]

    first, second = in_process.run(2, work)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[0], first[1])
    assert torch.equal(second[0], second[1])


def test_each_rank_of_a_resized_run_continues_its_steps_and_times() -> None:
    """Two workers out of step become three; what they trained on counts for all of them."""
    saved: list[dict[str, Any]] = []

    def begin(communicator: Communicator) -> None:
        strategy = normed(communicator)
        rank = communicator.rank
        progress = Progress(iteration=50, steps=(60, 40)[rank], samples=(600, 400)[rank])
        gathered = run_state.gather(strategy.replica, strategy, progress, {"rank": rank})
        if gathered is not None:
            saved.append(gathered)

    def go_on(communicator: Communicator) -> tuple[Progress, dict[str, Any]]:
        strategy = normed(communicator)
        return run_state.restore(saved[0], strategy.replica, strategy)

    in_process.run(2, begin)
    found = in_process.run(3, go_on)
    assert [progress.steps for progress, _ in found] == [60, 40, 60]
    assert [progress.steps_before for progress, _ in found] == [60, 40, 60]
    assert [account for _, account in found] == [{"rank": 0}, {"rank": 1}, {}]
    assert {(one.iteration, one.samples, one.samples_before) for one, _ in found} == {(50, 0, 1000)}
