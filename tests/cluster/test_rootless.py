"""A cluster made by an ordinary user, in a user namespace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import paceline

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

PROGRAM = """
import os, subprocess
from paceline.cluster.emulated import EmulatedCluster
from paceline.cluster_spec import parse
assert os.geteuid() == 65534
with EmulatedCluster.up(parse("nodes=2,cpus=0.5,bandwidth=100mbit"), calibrate=False) as cluster:
    words = ["sh", "-c", "ip -brief -4 address show eth0; tc qdisc show dev eth0; taskset -cp $$"]
    for node in range(2):
        print(subprocess.run(cluster.command(node, words), capture_output=True, text=True).stdout)
    print("\\n".join(cluster.addresses + cluster.state.notes))
    path = cluster.state.path
print(path, path.exists())
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    if subprocess.run([*AS_NOBODY, "unshare", "-Urn", "true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces for ordinary users")
    home = tmp_path_factory.mktemp("nobody")
    home.chmod(0o777)
    sources = str(Path(paceline.__file__).parents[1])
    environment = ["env", f"XDG_RUNTIME_DIR={home}", f"PYTHONPATH={sources}"]
    words = [*AS_NOBODY, *environment, sys.executable, "-B", "-c", PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_nodes_have_shaped_links(said: str) -> None:
    assert said.count("qdisc tbf") == 2


def test_it_says_that_there_are_no_quotas(said: str) -> None:
    assert "no CPU quotas" in said


def test_nodes_are_held_to_cores_instead(said: str) -> None:
    affinities = [line.rpartition(": ")[2] for line in said.splitlines() if "affinity" in line]
    assert [len(cores.split(",")) for cores in affinities] == [1, 1]


def test_nothing_of_it_stays(said: str) -> None:
    assert said.splitlines()[-1].endswith(" False")
