"""For every test: a leak check, one thread for torch, and a temporary home folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from paceline.emulation.cluster import examine
from paceline.emulation.namespaces import can_be_root
from paceline.errors import ClusterError
from tests.support.leaks import no_leaks, no_leaks_of_session, pytest_fixture_setup
from tests.support.warm import PrewarmedStarter, warm_spawning

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
    "iproute": (
        lambda: not can_make_networks(),
        "needs ip and tc (Debian: iproute2), and as root the right to make network namespaces",
    ),
    "quotas": (lambda: not has_quotas(), "needs a control group for CPU quotas that it can write"),
    "iperf": (lambda: lacks("iperf3"), "needs iperf3"),
    "ssh": (lambda: lacks("sshd", "ssh"), "needs sshd and ssh (Debian: openssh-server)"),
    "slurm": (
        lambda: lacks("slurmctld", "slurmd", "munged"),
        "needs SLURM (Debian: slurm-wlm and munge)",
    ),
    "ray": (lambda: find_spec("ray") is None, "needs Ray (pip install paceline[ray])"),
    "browser": (
        lambda: lacks("chromium", "chromedriver"),
        "needs a browser (Debian: chromium and chromium-driver)",
    ),
}
"""By marker: whether a test cannot run here, and why."""


def lacks(*programs: str) -> bool:
    # Servers lie where only root's search path leads.
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return any(shutil.which(program, path=path) is None for program in programs)


def can_make_networks() -> bool:
    """As root itself: a root without that right, as in most containers, is like any other user."""
    try:
        return can_be_root()
    except ClusterError:
        return False


def has_quotas() -> bool:
    try:
        return examine().has_quotas
    except ClusterError:
        return False


def pytest_configure(config: pytest.Config) -> None:
    # Two sessions share the processor, and so do the workers that tests start.
    torch.set_num_threads(1)
    config.stash[USERS_DATA] = os.environ.get("PACELINE_DATA")
    # One home and one data folder for all tests of the session: nothing is written to the user's
    # own, and data that is generated once is found by every test and by the programs it starts.
    home = tempfile.TemporaryDirectory(prefix="paceline-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(home.cleanup)
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    patch.setenv("HOME", home.name)
    patch.setenv("PACELINE_DATA", str(Path(home.name) / "data"))
    # NCCL's monitoring keeps sockets open for the life of a process: the leak check would see them.
    patch.setenv("NCCL_RAS_ENABLE", "0")


EXTERNAL = frozenset(UNMET) - {"root"} | {"real_data"}
"""Markers of tests that `make test` leaves to `make test-all`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark external tests, and skip those whose requirements are missing here.

    First of all hooks, so that `-m "not external"` sees the marker.
    """
    for item in items:
        if any(item.get_closest_marker(marker) for marker in EXTERNAL):
            item.add_marker("external")
    for marker, (unmet, reason) in UNMET.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and unmet():
            for item in marked:
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


@pytest.fixture(scope="session")
def starter() -> Iterator[PrewarmedStarter]:
    """For tests that start programs where starting them is not the point."""
    with PrewarmedStarter.opened() as opened:
        yield opened


@pytest.fixture
def warm_workers(starter: PrewarmedStarter) -> Iterator[None]:
    """Workers and servers that this process launches start warm."""
    with warm_spawning(starter):
        yield
