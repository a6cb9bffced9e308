"""Fixtures: communicators of several ranks, and the pool of worker processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.teams import TEAMS, Team, make_team
from tests.support.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4) as workers:
        yield workers


@pytest.fixture(params=TEAMS, ids=lambda team: f"{team[0]}-{team[1]}")
def team(request: pytest.FixtureRequest, pool: WorkerPool) -> Team:
    return make_team(pool, *request.param)


@pytest.fixture(params=["in_process", "torch_distributed", "shared_memory", "hierarchical"])
def team_of_three(request: pytest.FixtureRequest, pool: WorkerPool) -> Team:
    """Three ranks: neither a pair nor a power of two."""
    return make_team(pool, request.param, 3)
