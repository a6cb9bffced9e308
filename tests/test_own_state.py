"""What only one of several workers knows comes back to that worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import toy_replicas as toy
from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.sync.averaging import GradientAveraging
from paceline.worker import state
from paceline.worker.loop import Progress


def normed(communicator: Communicator) -> GradientAveraging:
    """Attached; with batch norm in front of the toy's own layers."""
    replica = toy.replica(communicator, toy.sgd())
    assert isinstance(replica.model, nn.Sequential)
    replica.model.insert(0, nn.BatchNorm1d(toy.FEATURES, affine=False))
    strategy = GradientAveraging()
    strategy.attach(replica)
    return strategy


def test_each_worker_gets_its_own_batch_norm_statistics_back() -> None:
    saved: list[dict[str, Any]] = []

    def work(communicator: Communicator) -> tuple[Tensor, Tensor]:
        strategy = normed(communicator)
        toy.train(strategy, range(2))
        gathered = state.gather(strategy.replica, strategy, Progress(), {})
        if gathered is not None:
            saved.append(gathered)
        communicator.barrier().wait()
        resumed = normed(communicator)
        state.restore(saved[0], resumed.replica, resumed)
        means = [own.replica.model.state_dict()["0.running_mean"] for own in (strategy, resumed)]
        return means[0], means[1]

    first, second = in_process.run(2, work)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[0], first[1])
    assert torch.equal(second[0], second[1])
