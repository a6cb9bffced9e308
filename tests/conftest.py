"""What every test gets: a leak check, two threads, and a home that is not the user's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from leaks import no_leaks, no_leaks_of_session, pytest_fixture_setup

__all__ = ["no_leaks", "no_leaks_of_session", "pytest_fixture_setup"]

REAL_DATA = {
    "MNIST": "mnist",
    "CIFAR-10": "cifar-10-batches-py",
    "SVHN": "svhn",
}
"""Folders below PACELINE_DATA that the tests of real data need."""

USERS_DATA = pytest.StashKey[str | None]()
"""PACELINE_DATA as the user set it, before the tests got a folder of their own."""

UNMET: dict[str, tuple[Callable[[], bool], str]] = {
    "root": (lambda: os.geteuid() != 0, "needs to be run as root"),
    "gpu": (lambda: not torch.cuda.is_available(), "needs a CUDA device"),
}
"""By marker: whether a test cannot run here, and why."""


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(2)
    config.stash[USERS_DATA] = os.environ.get("PACELINE_DATA")
    # One home and one data folder for all tests of the session: nothing is written to the user's
    # own, and data that is generated once is found by every test and by the programs it starts.
    home = tempfile.TemporaryDirectory(prefix="paceline-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(home.cleanup)
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    patch.setenv("HOME", home.name)
    patch.setenv("PACELINE_DATA", str(Path(home.name) / "data"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, (unmet, reason) in UNMET.items():
        if unmet():
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def real_data_dir(pytestconfig: pytest.Config) -> Path:
    """The user's folder of real datasets, to be read only; skips where it is not whole."""
    folder = pytestconfig.stash[USERS_DATA]
    if folder is None:
        pytest.skip("needs PACELINE_DATA, a folder with the expanded MNIST, CIFAR-10 and SVHN")
    missing = [name for name, part in REAL_DATA.items() if not (Path(folder) / part).is_dir()]
    if missing:
        pytest.skip(f"PACELINE_DATA={folder} lacks {', '.join(missing)}")
    return Path(folder)
