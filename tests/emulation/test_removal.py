"""Everything of a cluster goes, however its owner, its makers or its processes end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.emulation import cpu_limits, network
from paceline.emulation.cluster import EmulatedCluster, all_clusters
from paceline.emulation.processes import ProcessId, network_namespace
from paceline.emulation.removal import pids_of
from paceline.emulation.state import ClusterState, load, path_of
from paceline.errors import ClusterError
from tests.support.node_commands import small_cluster

pytestmark = [pytest.mark.root, pytest.mark.iproute]

OWNER = """
import sys, time
from paceline.emulation.cluster import EmulatedCluster
from paceline.config.cluster_spec import parse
cluster = EmulatedCluster.up(parse("nodes=2,cpus=0.5"), sys.argv[1], calibrate=False)
print(cluster.name, flush=True)
time.sleep(60)
"""

STUBBORN = 'trap "" TERM; echo ready; while :; do sleep 0.1; done'


@contextlib.contextmanager
def started(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that has written its first line."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip()
        yield process
    finally:
        process.kill()
        process.communicate()


def gone(process: ProcessId) -> bool:
    """Soon: what was killed takes a moment."""
    deadline = time.monotonic() + 10
    while process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not process.is_alive()


def test_the_next_cluster_removes_that_of_a_killed_owner() -> None:
    name = f"orphan-{os.getpid()}"
    with started([sys.executable, "-c", OWNER, name]) as owner:
        left = load(path_of(name))
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        with small_cluster("nodes=1"):
            assert not left.path.exists()
            assert all(gone(namespace.holder) for namespace in left.namespaces())
            assert not any(group.exists() for group in left.groups.values())


def test_the_guardian_removes_the_cluster_of_a_killed_owner() -> None:
    name = f"guarded-{os.getpid()}"
    with started([sys.executable, "-c", OWNER, name]) as owner:
        left = load(path_of(name))
        with started(EmulatedCluster.open(name).command(0, ["sh", "-c", STUBBORN])) as process:
            inside = ProcessId.of(process.pid)
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            assert is_removed(left)
            assert gone(inside)
    assert all(gone(namespace.holder) for namespace in left.namespaces())
    assert not any(group.exists() for group in left.groups.values())


def is_removed(state: ClusterState) -> bool:
    """Soon: what runs inside gets some seconds to end by itself."""
    deadline = time.monotonic() + 60
    while state.path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not state.path.exists()


def test_a_cluster_with_a_living_owner_is_kept() -> None:
    name = f"owned-{os.getpid()}"
    with started([sys.executable, "-c", OWNER, name]) as owner:
        with small_cluster("nodes=1"):
            assert name in [cluster.name for cluster in all_clusters()]
        assert EmulatedCluster.open(name).command(0, ["true"])
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert name not in [cluster.name for cluster in all_clusters()]


def test_down_kills_processes_that_ignore_sigterm() -> None:
    with small_cluster("nodes=1") as cluster:
        # Without the cluster's variable, only its namespace tells where it is.
        argv = cluster.command(0, ["env", "-i", "/bin/sh", "-c", STUBBORN])
        with started(argv) as process:
            inside = ProcessId.of(process.pid)
            cluster.down()
            assert gone(inside)


def test_a_process_is_found_after_the_holder_of_its_node_was_killed() -> None:
    with small_cluster("nodes=1") as cluster:
        argv = cluster.command(0, ["sh", "-c", STUBBORN])
        with started(argv) as process:
            inside = ProcessId.of(process.pid)
            holder = cluster.state.nodes[0].holder
            os.kill(holder.pid, signal.SIGKILL)
            assert gone(holder)
            with pytest.raises(ClusterError, match="no longer exists"):
                cluster.command(0, ["true"])
            cluster.down()
            assert gone(inside)


def test_processes_outside_are_no_part_of_it() -> None:
    outside = subprocess.Popen(["sleep", "60"])
    try:
        with small_cluster("nodes=1,cpus=0.5") as cluster:
            found = pids_of(cluster.state)
            own = network_namespace(os.getpid())
            assert outside.pid not in found
            assert all(network_namespace(pid) != own for pid in found)
        assert outside.poll() is None
    finally:
        outside.kill()
        outside.wait()


def test_a_failure_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"half-{os.getpid()}"
    holders: list[ProcessId] = []

    def fail(*_: object) -> None:
        holders.extend(namespace.holder for namespace in load(path_of(name)).namespaces())
        raise ClusterError("joining failed")

    monkeypatch.setattr(network, "bridge", fail)
    with pytest.raises(ClusterError, match="joining failed"):
        small_cluster("nodes=2,cpus=0.5", name)
    assert len(holders) == 3
    assert all(gone(holder) for holder in holders)
    assert not path_of(name).exists()


@pytest.mark.quotas
def test_groups_are_on_file_from_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"noted-{os.getpid()}"
    made: list[Path] = []

    def interrupt(group: Path, cpus: float) -> None:
        assert group.is_dir()
        assert group in load(path_of(name)).groups.values()
        made.append(group)
        raise KeyboardInterrupt

    monkeypatch.setattr(cpu_limits, "set_quota", interrupt)
    with pytest.raises(KeyboardInterrupt):
        small_cluster("nodes=2,cpus=0.5", name)
    assert len(made) == 1
    assert not made[0].exists()


def test_down_a_second_time_does_nothing() -> None:
    with small_cluster("nodes=1") as cluster:
        cluster.down()
        cluster.down()
        with pytest.raises(ClusterError, match="no cluster named"):
            EmulatedCluster.open(cluster.name)
