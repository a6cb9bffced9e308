"""Runs that several tests look at, each made once, and the folder where own_code.py is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.commands import HERE, Ended, launch, train
from paceline.records import Result


@pytest.fixture(autouse=True)
def in_folder_of_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


@pytest.fixture(scope="session")
def talkative_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Two workers started by the command line, with all that is said and written."""
    out = tmp_path_factory.mktemp("talkative")
    variables = {"OWN_NOTES": str(out)}
    settings = {"model": "own_code:Talkative", "nproc_per_node": 2, "checkpoint_every": 12}
    with train(out, variables, **settings) as command:
        return out / "run", command.end()


@pytest.fixture(scope="session")
def three_workers(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The result of one command with three workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HERE)
        return launch(tmp_path_factory.mktemp("three"), nproc_per_node=3).result or {}
