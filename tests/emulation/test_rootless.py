"""A cluster made by an ordinary user, in a user namespace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.emulation.processes import process_space

pytestmark = [pytest.mark.root, pytest.mark.iproute]

AS_NOBODY = [
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    # To read the interpreter wherever it is; it gives no power over networks or groups.
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
]

ASKED_BITS_PER_SECOND = 20e6

PROGRAM = f"""
import json, os, shutil, subprocess
from paceline.emulation.cluster import EmulatedCluster
from paceline.config.cluster_spec import parse
assert os.geteuid() == 65534
spec = parse("nodes=2,cpus=0.5,bandwidth={ASKED_BITS_PER_SECOND / 1e6:g}mbit")
with EmulatedCluster.up(spec, calibrate=False) as cluster:
    argv = ["sh", "-c", "ip -brief -4 address show eth0; tc qdisc show dev eth0; taskset -cp $$"]
    for node in range(2):
        print(subprocess.run(cluster.command(node, argv), capture_output=True, text=True).stdout)
    if shutil.which("iperf3"):
        argv = cluster.command(1, ["iperf3", "-s", "-1", "--forceflush"])
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
            next(line for line in server.stdout if "listening" in line)
            argv = ["iperf3", "-J", "-t", "1", "-c", cluster.addresses[1]]
            done = subprocess.run(cluster.command(0, argv), capture_output=True, timeout=60)
            counters = cluster.command(0, ["grep", "eth0", "/proc/net/dev"])
            received = json.loads(done.stdout)["end"]["sum_received"]
            counted = subprocess.check_output(counters, text=True).split()[9]
            server.communicate(timeout=60)
        print("transfer", counted, received["bytes"], received["bits_per_second"])
    print("\\n".join(cluster.addresses + cluster.state.notes))
    path = cluster.state.path
print(path, path.exists())
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    if subprocess.run([*AS_NOBODY, "unshare", "-Urn", "true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces for ordinary users")
    home = tmp_path_factory.mktemp("nobody")
    home.chmod(0o777)
    sources = str(Path(paceline.__file__).parents[1])
    environment = ["env", f"XDG_STATE_HOME={home}", f"PYTHONPATH={sources}"]
    argv = [*AS_NOBODY, *environment, sys.executable, "-B", "-c", PROGRAM]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_nodes_have_shaped_links(expected: str) -> None:
    assert expected.count("qdisc tbf") == 2


@pytest.mark.iperf
def test_data_arrives_no_faster_than_the_requested_rate(expected: str) -> None:
    """On a busy machine slower; a link that is not shaped would be a hundred times as fast."""
    [line] = [line for line in expected.splitlines() if line.startswith("transfer ")]
    counted_bytes, received_bytes, bits_per_second = map(float, line.split()[1:])
    assert 0 < received_bytes < counted_bytes, "of what leaves the node's own interface"
    assert 0.2 * ASKED_BITS_PER_SECOND < bits_per_second < 1.25 * ASKED_BITS_PER_SECOND


def test_it_is_found_again_after_a_logout(expected: str) -> None:
    """$XDG_RUNTIME_DIR goes then, and clusters that were to stay do not."""
    path = expected.splitlines()[-1].split()[0]
    assert f"/paceline/clusters/{process_space()}/run-" in path


def test_missing_quotas_are_reported(expected: str) -> None:
    assert "no CPU quotas" in expected


def test_nodes_are_held_to_cores_instead(expected: str) -> None:
    affinities = [line.rpartition(": ")[2] for line in expected.splitlines() if "affinity" in line]
    assert [len(cores.split(",")) for cores in affinities] == [1, 1]


def test_nothing_is_left_behind(expected: str) -> None:
    assert expected.splitlines()[-1].endswith(" False")
