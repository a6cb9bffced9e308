"""A failed worker fails its peers, each with a one-line error."""

from __future__ import annotations

import pytest

from paceline.comm.communicator import Communicator
from paceline.errors import PeerError
from paceline.strategies import create_strategy
from tests.strategies.contract.exact import ExactModel
from tests.strategies.contract.harness import (
    Connections,
    Task,
    build_replica,
    options_of,
    train_step,
)
from tests.support.worker_pool import WorkerPool

AVERAGING = ("gather_scatter", "allreduce", "ring", "tree", "halving_doubling", "overlap", "ddp")


def leave_in_the_second_step(communicator: Communicator, name: str) -> None:
    task = Task()
    strategy = create_strategy(name, options_of(name, task))
    strategy.setup(build_replica(ExactModel(), Connections(communicator), task))
    train_step(strategy, 0, 16, task)
    if communicator.rank == 1:
        raise RuntimeError("out of memory, say")
    train_step(strategy, 1, 16, task)


@pytest.mark.parametrize("name", AVERAGING)
def test_peers_of_a_failed_worker_raise_a_one_line_error(pool: WorkerPool, name: str) -> None:
    first, failed = pool.outcomes(
        2, leave_in_the_second_step, name, fresh=True, timeout_seconds=5.0
    )
    assert isinstance(failed.error, RuntimeError)
    assert isinstance(first.error, PeerError), first.error
    assert "\n" not in str(first.error)
    assert "rank 1" in str(first.error)
