"""Latency by the forwarder: frames come whole, in order, and not before their time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.config.cluster_spec import parse
from paceline.emulation import calibration, latency, network
from paceline.emulation import latency as compile
from paceline.emulation.cluster import EmulatedCluster
from paceline.emulation.namespaces import Namespace
from paceline.emulation.processes import ProcessId
from paceline.emulation.state import ClusterState
from tests.support.node_commands import echoes_unchanged, run_on_node, small_cluster

IDLE_SECONDS = 0.5
ROUND_TRIP_SECONDS = 0.04


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    if compile.compiler() is None:
        pytest.skip("needs a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "has_netem", lambda as_root: False)
        made = small_cluster(f"nodes=3,bandwidth=50mbit,latency={ROUND_TRIP_SECONDS * 1e3}ms")
    with made:
        yield made


@pytest.mark.root
@pytest.mark.iproute
def test_a_message_is_delayed_by_the_latency(cluster: EmulatedCluster) -> None:
    # Only a lower bound: what a busy machine adds has none, and half of it may be taken off.
    assert calibration.round_trip_seconds(cluster.state) > 0.45 * ROUND_TRIP_SECONDS


@pytest.mark.root
@pytest.mark.iproute
def test_large_frames_come_whole(cluster: EmulatedCluster) -> None:
    assert echoes_unchanged(cluster, 0, 2, 4 << 20)


@pytest.mark.root
@pytest.mark.iproute
def test_a_frame_for_one_node_does_not_reach_another(cluster: EmulatedCluster) -> None:
    def received() -> int:
        return int(run_on_node(cluster, 1, "grep", "eth0", "/proc/net/dev").stdout.split()[1])

    before = received()
    assert echoes_unchanged(cluster, 0, 2, 1 << 20)
    assert received() - before < 10_000


@pytest.mark.root
@pytest.mark.iproute
def test_a_link_is_held_to_its_rate(cluster: EmulatedCluster) -> None:
    """Towards a node only the forwarder does so."""
    found = [item for item in calibration.link_rates(cluster.state) if item.what == "bandwidth in"]
    assert len(found) == 3
    assert all(0 < item.got < 1.25 * 50e6 for item in found)


@pytest.mark.root
@pytest.mark.iproute
def test_it_waits_without_using_the_cpu(cluster: EmulatedCluster) -> None:
    assert cluster.state.forwarder is not None
    times = psutil.Process(cluster.state.forwarder.pid).cpu_times
    before = times()
    time.sleep(IDLE_SECONDS)
    after = times()
    used = after.user + after.system - before.user - before.system
    assert used < IDLE_SECONDS / 10


@pytest.mark.root
@pytest.mark.iproute
def test_the_forwarder_goes_with_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    if compile.compiler() is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setattr(latency, "has_netem", lambda as_root: False)
    with small_cluster("nodes=1,latency=1ms") as made:
        forwarder = made.state.forwarder
        assert forwarder is not None
        assert forwarder.is_alive()
    assert not forwarder.is_alive()


def test_netem_delays_before_the_token_bucket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[str] = []
    monkeypatch.setattr(Namespace, "run", lambda _, argv, stdin="": commands.append(" ".join(argv)))
    monkeypatch.setattr(latency, "program", str)
    monkeypatch.setattr(network, "program", str)
    monkeypatch.setattr(latency, "has_netem", lambda as_root: True)
    monkeypatch.setattr(calibration, "round_trip_seconds", lambda state: 0.0011)
    switch = Namespace(ProcessId(1, 1), 1, is_of_user=False)
    state = ClusterState(tmp_path / "name.json", parse("nodes=2,bandwidth=1gbit,latency=1ms"))
    latency.join_ports(state, switch)
    delays = [line for line in commands if "dev port1 root handle 1: netem delay" in line]
    # Half a round trip at first; then without half of what the machine itself adds.
    assert [line.split("delay ")[1].split()[0] for line in delays][:2] == ["500.0us", "450.0us"]
    assert f"dev port1 parent 1:1 handle 10: {network.token_bucket(1e9)}" in commands[-1]
    assert state.delay == "netem"


def test_a_forwarder_counts_as_started_only_inside_the_switch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine's own network may have as many sockets of packets as the switch has ports."""
    inside = iter([1, 1, 7])
    monkeypatch.setattr(latency, "network_namespace", lambda pid: next(inside))
    monkeypatch.setattr(latency, "_count_packet_sockets", lambda pid: 9)
    monkeypatch.setattr(compile, "forwarder", lambda: tmp_path / "forwarder")
    monkeypatch.setattr(latency, "spawn", lambda argv, environment: os.getpid())
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (0, 0))
    monkeypatch.setattr(Namespace, "command", lambda _, argv: list(argv))
    state = ClusterState(tmp_path / "name.json", parse("nodes=2,latency=1ms"))
    latency._forward(state, Namespace(ProcessId(1, 1), 7, is_of_user=False), 0.001)
    assert next(inside, None) is None


def test_ipv6_is_not_configured_without_kernel_support(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[str] = []
    monkeypatch.setattr(network, "_batch", lambda namespace, tool, lines: commands.extend(lines))
    monkeypatch.setattr(Namespace, "run", lambda namespace, argv: "")
    monkeypatch.setattr(network, "IPV6", tmp_path / "missing")
    switch = Namespace(ProcessId(1, 1), 1, is_of_user=False)
    network.connect(switch, [switch], ["10.0.0.1", "10.0.0.2"])
    network.bridge(switch, 1)
    assert "link set port0 up" in commands
    assert not [line for line in commands if "addrgenmode" in line]


def test_the_mac_address_ends_with_the_node_number() -> None:
    assert network.mac(0x1FE).split(":")[4:] == ["01", "fe"]
