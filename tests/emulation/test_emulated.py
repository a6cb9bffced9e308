"""An emulated cluster: connected nodes with the requested links and CPU shares."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest

from paceline.emulation.cluster import SHARED_VARIABLE, EmulatedCluster
from paceline.emulation.state import load
from paceline.errors import ClusterError
from paceline.measure.machine import cgroup_dirs
from tests.support.node_commands import (
    echoes_unchanged,
    run_on_node,
    run_python_on_node,
    small_cluster,
)

pytestmark = [pytest.mark.root, pytest.mark.iproute]

SPEC = "nodes=3,cpus=0.5,bandwidth=100mbit/2:20mbit,slow=1:0.5"


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    with small_cluster(SPEC) as made:
        yield made


def interfaces() -> set[str]:
    links = json.loads(subprocess.check_output(["ip", "-json", "link"]))
    return {link["ifname"] for link in links}


def test_every_node_has_its_own_address(cluster: EmulatedCluster) -> None:
    for node, address in enumerate(cluster.addresses):
        seen = run_on_node(cluster, node, "ip", "-brief", "-4", "address", "show", "eth0").stdout
        assert seen.split()[2] == f"{address}/24"
    assert len(set(cluster.addresses)) == 3


def test_nodes_can_exchange_data(cluster: EmulatedCluster) -> None:
    assert echoes_unchanged(cluster, 0, 1, 1 << 20)


def test_nodes_see_nothing_of_the_machines_network(cluster: EmulatedCluster) -> None:
    links = json.loads(run_on_node(cluster, 0, "ip", "-json", "link").stdout)
    assert {link["ifname"] for link in links} == {"lo", "eth0"}


@pytest.mark.iperf
@pytest.mark.parametrize(("source", "asked"), [(0, 100e6), (2, 20e6)], ids=["common", "its own"])
def test_a_link_has_about_the_requested_rate(
    cluster: EmulatedCluster, source: int, asked: float
) -> None:
    server = subprocess.Popen(
        cluster.command(1, ["iperf3", "-s", "-1", "--forceflush"]), stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    while b"listening" not in server.stdout.readline():
        assert server.poll() is None
    argv = ["iperf3", "-J", "-t", "2", "-c", cluster.addresses[1]]
    done = run_on_node(cluster, source, *argv)
    server.communicate(timeout=30)
    got = json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]
    # Anything between is a busy machine's; a link that is not shaped carries ten times as much.
    assert 0.5 * asked < got < 1.25 * asked


@pytest.mark.quotas
@pytest.mark.parametrize(("node", "cpus"), [(0, 0.5), (1, 0.25)], ids=["common", "slow"])
def test_a_node_has_its_share_of_the_cpu(cluster: EmulatedCluster, node: int, cpus: float) -> None:
    program = "import pathlib; print(pathlib.Path('/proc/self/cgroup').read_text())"
    groups = run_python_on_node(cluster, node, program)
    group = cluster.state.groups[node]
    assert f"/{group.name}\n" in groups + "\n"
    if (group / "cpu.max").exists():
        quota, period = map(int, (group / "cpu.max").read_text().split())
    else:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
    assert quota / period == cpus
    assert period <= 10_000


def test_a_command_is_itself_inside(cluster: EmulatedCluster) -> None:
    """Its streams, exit code, environment and process id are not another's."""
    script = 'read line; echo "$line $PACELINE_CLUSTER $OWN"; exit 7'
    process = subprocess.Popen(
        cluster.command(1, ["sh", "-c", script]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OWN": "kept"},
    )
    assert process.stdin is not None
    while process.pid not in cluster.processes(1):
        assert process.poll() is None
    out, _ = process.communicate("given\n", timeout=30)
    assert out == f"given {cluster.state.path} kept\n"
    assert process.returncode == 7


def test_the_state_file_describes_the_cluster(cluster: EmulatedCluster) -> None:
    state = load(cluster.state.path)
    assert (state.spec, state.addresses[:3]) == (cluster.spec, cluster.addresses)
    assert json.loads(cluster.state.path.read_text())["name"] == cluster.name


def test_an_unknown_node_is_rejected(cluster: EmulatedCluster) -> None:
    with pytest.raises(ClusterError, match="has nodes 0 to 2, not 3"):
        cluster.command(3, ["true"])


def test_a_second_cluster_with_the_same_name_is_rejected(cluster: EmulatedCluster) -> None:
    with pytest.raises(ClusterError, match="is already up"):
        small_cluster("nodes=2", cluster.name)
    assert run_on_node(cluster, 0, "true").returncode == 0


def test_a_run_on_a_shared_cluster_has_its_own_errors(
    cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED_VARIABLE, str(cluster.state.path))

    def run() -> None:
        with EmulatedCluster.for_run(cluster.spec, quiet=True) as shared:
            raise ClusterError(f"a node of {shared.name} has ended")

    with pytest.raises(ClusterError, match=f"a node of {cluster.name} has ended"):
        run()


def test_connections_start_without_metrics_of_earlier_ones(cluster: EmulatedCluster) -> None:
    assert echoes_unchanged(cluster, 0, 1, 1 << 20)
    assert run_on_node(cluster, 0, "ip", "tcp_metrics", "show").stdout == ""


def test_two_clusters_are_isolated(cluster: EmulatedCluster) -> None:
    with small_cluster("nodes=2,cpus=0.5") as other:
        assert not set(other.addresses) & set(cluster.addresses)
        assert not set(other.state.groups.values()) & set(cluster.state.groups.values())
        assert echoes_unchanged(other, 0, 1, 1 << 16)
    assert echoes_unchanged(cluster, 0, 1, 1 << 16)


def test_coming_and_going_it_touches_no_interface_of_the_machine() -> None:
    before = interfaces()
    with small_cluster("nodes=2,bandwidth=1gbit") as made:
        assert interfaces() == before
    assert interfaces() == before
    assert not made.state.path.exists()


@pytest.mark.quotas
def test_down_leaves_no_group() -> None:
    with small_cluster("nodes=2,cpus=0.5") as made:
        assert len(made.state.groups) == 2
        assert all(group.is_dir() for group in made.state.groups.values())
    left = [
        path for folder in cgroup_dirs("cpu") for path in folder.glob(f"paceline-{made.name}-*")
    ]
    assert left == []
