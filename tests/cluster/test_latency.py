"""Latency by the forwarder: frames come whole, in order, and not before their time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.inside import comes_back_whole, run_inside, small_cluster
from paceline.cluster import compile, latency, links, measuring
from paceline.cluster.emulated import EmulatedCluster
from paceline.cluster.namespaces import Namespace
from paceline.cluster.processes import ProcessId
from paceline.cluster.state import State
from paceline.cluster_spec import parse
from paceline.errors import ClusterError

pytestmark = [pytest.mark.root, pytest.mark.iproute]

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


def test_a_message_takes_its_time(cluster: EmulatedCluster) -> None:
    # Only a lower bound: what a busy machine adds has none, and half of it may be taken off.
    assert measuring.round_trip_seconds(cluster.state) > 0.45 * ROUND_TRIP_SECONDS


def test_large_frames_come_whole(cluster: EmulatedCluster) -> None:
    assert comes_back_whole(cluster, 0, 2, 4 << 20)


def test_a_frame_for_one_node_does_not_reach_another(cluster: EmulatedCluster) -> None:
    def received() -> int:
        return int(run_inside(cluster, 1, "grep", "eth0", "/proc/net/dev").stdout.split()[1])

    before = received()
    assert comes_back_whole(cluster, 0, 2, 1 << 20)
    assert received() - before < 10_000


def test_a_link_is_held_to_its_rate(cluster: EmulatedCluster) -> None:
    """Towards a node only the forwarder does so."""
    found = [item for item in measuring.link_rates(cluster.state) if item.what == "bandwidth in"]
    assert len(found) == 3
    assert all(0 < item.got < 1.25 * 50e6 for item in found)


def test_it_waits_without_using_the_cpu(cluster: EmulatedCluster) -> None:
    assert cluster.state.forwarder is not None
    stat = Path(f"/proc/{cluster.state.forwarder.pid}/stat")
    assert stat.read_text().rpartition(")")[2].split()[0] == "S"


def test_the_forwarder_goes_with_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    if compile.compiler() is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setattr(latency, "has_netem", lambda as_root: False)
    with small_cluster("nodes=1,latency=1ms") as made:
        forwarder = made.state.forwarder
        assert forwarder is not None
        assert forwarder.is_alive()
    assert not forwarder.is_alive()


def test_where_there_is_netem_it_delays_before_the_token_bucket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Namespace, "run", lambda _, words, given="": told.append(" ".join(words)))
    monkeypatch.setattr(latency, "has_netem", lambda as_root: True)
    monkeypatch.setattr(measuring, "round_trip_seconds", lambda state: 0.0011)
    switch = Namespace(ProcessId(1, 1), 1, is_of_user=False)
    state = State(tmp_path / "name.json", parse("nodes=2,bandwidth=1gbit,latency=1ms"))
    latency.join_ports(state, switch)
    delays = [line for line in told if "dev port1 root handle 1: netem delay" in line]
    # Half a round trip at first; then without half of what the machine itself adds.
    assert [line.split("delay ")[1].split()[0] for line in delays][:2] == ["500.0us", "450.0us"]
    assert f"dev port1 parent 1:1 handle 10: {links.token_bucket(1e9)}" in told[-1]
    assert state.delay == "netem"


def test_without_a_compiler_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(ClusterError, match="install gcc, or leave out latency"):
        compile.forwarder()


def test_the_binary_is_made_once_and_again_for_another_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if compile.compiler() is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "forwarder.c"
    source.write_text("int main(void) { return 0; }\n")
    monkeypatch.setattr(compile, "SOURCE", source)
    first = compile.forwarder()
    made_at = first.stat().st_mtime_ns
    assert compile.forwarder() == first
    assert first.stat().st_mtime_ns == made_at
    source.write_text("int main(void) { return 1; }\n")
    assert compile.forwarder() != first


def test_a_port_is_told_by_the_end_of_its_address() -> None:
    assert links.mac(0x1FE).split(":")[4:] == ["01", "fe"]
