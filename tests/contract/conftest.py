"""The workers that the contract suite runs strategies on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4) as workers:
        yield workers
