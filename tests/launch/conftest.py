"""Runs that several tests look at, each made once, and the folder where own_code.py is found."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
def three_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Result]:
    """The result of one command with three workers."""
    before = Path.cwd()
    os.chdir(HERE)
    try:
        yield launch(tmp_path_factory.mktemp("three"), nproc_per_node=3).result or {}
    finally:
        os.chdir(before)
