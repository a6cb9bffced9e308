"""Runs that several tests look at, each made once, and the folder where own_code.py is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.commands import HERE, Command, Ended, train
from warm import Nursery


@pytest.fixture(autouse=True)
def in_folder_of_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


@pytest.fixture(autouse=True)
def warm_commands(nursery: Nursery, warm_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands start warm, and so do workers that this process launches."""
    monkeypatch.setattr(Command, "nursery", nursery)


@pytest.fixture(scope="session")
def talkative_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Two workers started cold by the command line, with all that is said and written.

    Of its twelve iterations it keeps checkpoints after the sixth and the last.
    """
    out = tmp_path_factory.mktemp("talkative")
    variables = {"OWN_NOTES": str(out)}
    settings = {"model": "own_code:Talkative", "nproc_per_node": 2, "checkpoint_every": 6}
    with train(out, variables, **settings) as command:
        return out / "run", command.end()
