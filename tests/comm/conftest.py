"""Fixtures: communicators of several ranks, and the pool of worker processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_groups import RANK_GROUPS, RankGroup, make_rank_group
from tests.support.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4) as workers:
        yield workers


@pytest.fixture(params=RANK_GROUPS, ids=lambda ranks: f"{ranks[0]}-{ranks[1]}")
def ranks(request: pytest.FixtureRequest, pool: WorkerPool) -> RankGroup:
    return make_rank_group(pool, *request.param)


@pytest.fixture(
    params=["in_process", "torch_distributed", "shared_memory", "hierarchical", "shared_gpu"]
)
def three_ranks(request: pytest.FixtureRequest, pool: WorkerPool) -> RankGroup:
    """Three ranks: neither a pair nor a power of two."""
    return make_rank_group(pool, request.param, 3)
