"""The workers that the contract suite runs strategies on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.comm.communicator import Communicator
from paceline.strategies import STRATEGIES
from tests.support.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4) as workers:
        workers.run(4, import_strategies)
        yield workers


def import_strategies(_: Communicator) -> None:
    """So that no worker waits for another one's imports, which can take longer than it waits."""
    for name in STRATEGIES.names():
        STRATEGIES.load(name)
