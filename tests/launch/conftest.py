"""Runs and stores that several tests share, and commands that start quickly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # torch lists neither

from paceline.launch.elastic.store_client import StoreClient
from tests.support.commands import Ended, train, warm_commands
from tests.support.warm import PrewarmedStarter


@pytest.fixture(autouse=True)
def warm(starter: PrewarmedStarter) -> Iterator[None]:
    with warm_commands(starter):
        yield


@pytest.fixture
def store() -> Store:
    return HashStore()


@pytest.fixture
def client(store: Store) -> Iterator[StoreClient]:
    with closing(StoreClient(store, "here")) as client:
        yield client


@pytest.fixture(scope="session")
def talkative_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Two workers started cold by the command line, with their output and records.

    Of its twelve iterations it keeps checkpoints after the sixth and the last.
    """
    out = tmp_path_factory.mktemp("talkative")
    variables = {"OWN_NOTES": str(out)}
    settings = {"model": "user_code:Talkative", "nproc_per_node": 2, "checkpoint_every": 6}
    with train(out, variables, **settings) as command:
        return out / "run", command.end()
