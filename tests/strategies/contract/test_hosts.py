"""Strategies on two hosts of two workers match one worker."""

from __future__ import annotations

import pytest
import torch

from paceline.comm import hierarchical
from paceline.comm.communicator import Communicator
from tests.strategies.contract.harness import Connections, Task, Trained, train_exactly
from tests.strategies.contract.test_strategies import trained_alone
from tests.support.worker_pool import WorkerPool

TASK = Task(shares=(2.0, 1.0, 1.0, 4.0))


def train_on_two_hosts(
    communicator: Communicator, name: str, is_hierarchical: bool, task: Task
) -> Trained:
    node = communicator.rank // 2
    if not is_hierarchical:
        return train_exactly(Connections(communicator, node=node), name, task)
    with hierarchical.connect(communicator, node) as hierarchical_communicator:
        return train_exactly(Connections(hierarchical_communicator, node=node), name, task)


@pytest.mark.parametrize(
    ("name", "is_hierarchical"),
    [
        ("shared", False),
        ("shared", True),
        ("allreduce", True),
        ("overlap", True),
        ("sharded", True),
        ("ring", True),
        ("tree", True),
    ],
)
def test_two_hosts_of_two_workers_match_one_worker(
    pool: WorkerPool, name: str, is_hierarchical: bool
) -> None:
    expected = trained_alone(Task())
    trained = pool.run(4, train_on_two_hosts, name, is_hierarchical, TASK, fresh=True)
    for rank, worker in enumerate(trained):
        for step, (own, right) in enumerate(
            zip(worker.after_each_step, expected.after_each_step, strict=True)
        ):
            assert torch.equal(own, right), f"rank {rank} differs after step {step}"
