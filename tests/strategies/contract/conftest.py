"""The worker pool of the contract tests."""

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
    """Import strategies first: an import may exceed the timeout of waiting workers."""
    for name in STRATEGIES.names():
        STRATEGIES.load(name)
