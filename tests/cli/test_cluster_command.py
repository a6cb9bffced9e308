"""`paceline cluster`: up, status, exec and down as a user types them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.config.cluster_spec import parse
from paceline.emulation import processes, state
from paceline.emulation.cluster import EmulatedCluster
from paceline.emulation.processes import ProcessId
from tests.support.node_commands import small_cluster

NAME = f"command-{os.getpid()}"


@pytest.fixture(scope="module")
def name() -> Iterator[str]:
    """A cluster that another process made and left up."""
    flags = ["--nodes", "2", "--bandwidth", "1gbit", "--no-calibrate", "--name"]
    argv = [sys.executable, "-m", "paceline", "cluster", "up", *flags, NAME]
    subprocess.run(argv, check=True, capture_output=True)
    cluster = EmulatedCluster.open(NAME)
    yield NAME
    cluster.down()


@pytest.mark.root
@pytest.mark.iproute
def test_a_kept_cluster_outlives_the_command_that_made_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "status"]) == 0
    out = capsys.readouterr().out
    assert f"Cluster {name}, up until `paceline cluster down {name}`" in out
    assert EmulatedCluster.open(name).addresses[1] in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.root
@pytest.mark.iproute
def test_exec_passes_on_input_output_and_exit_code(name: str) -> None:
    script = "cat; ip -brief -4 address show eth0; exit 5"
    argv = ["cluster", "exec", "--name", name, "1", "--", "sh", "-c", script]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *argv], input="hello\n", text=True, capture_output=True
    )
    assert done.stdout.startswith("hello\n")
    assert EmulatedCluster.open(name).addresses[1] in done.stdout
    assert done.returncode == 5


@pytest.mark.root
@pytest.mark.iproute
def test_up_measures_and_shows_it_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    other = f"{NAME}-measured"
    assert main(["cluster", "up", "--nodes", "2", "--name", other]) == 0
    out = capsys.readouterr().out
    assert main(["cluster", "down", other]) == 0
    assert "round trip" in out
    assert "requested" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.root
@pytest.mark.iproute
def test_down_without_a_name_leaves_the_clusters_of_runs_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_folders", lambda: iter([tmp_path / "clusters"]))
    with small_cluster("nodes=1") as owned:
        assert main(["cluster", "down"]) == 2
        assert owned.state.path.exists()
    assert f"no cluster named default; available: {owned.name}" in capsys.readouterr().err


def test_down_by_name_removes_orphans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_folders", lambda: iter([tmp_path / "clusters"]))
    monkeypatch.setattr(processes, "all_pids", lambda: iter(()))
    left, named = state.path_of("left"), state.path_of("named")
    state.ClusterState(left, parse("nodes=1"), owner=ProcessId(os.getpid(), 0)).create()
    state.ClusterState(named, parse("nodes=1")).create()
    assert main(["cluster", "down", "named"]) == 0
    assert not named.exists()
    assert not left.exists()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["up", "--nodes", "two"], "--nodes: must be 1 to 250, got 'two'"),
        (
            ["up", "--nodes", "2", "--cpus", "0"],
            "--cpus: must be a number of cores of 0.001 to 10000",
        ),
        (
            ["up", "--nodes", "2", "--bandwidth", "fast"],
            "--bandwidth: must be a rate of 1kbit to 1000gbit",
        ),
        (["up", "--nodes", "2", "--bandwidth", "1gbit,cpus=1"], "--bandwidth: must be a rate"),
        (["up", "--nodes", "2", "--latency", "5"], "--latency: must be a time such as 200us"),
        (["up", "--nodes", "2", "--slow", "2:0.5"], "(nodes below 2), got '2:0.5'"),
        (["up", "--nodes", "2", "--name", "a/b"], "invalid cluster name 'a/b': use letters"),
        (
            ["up", "--nodes", "2", "--cpus", "0.0001"],
            "--cpus: must be a number of cores of 0.001 to 10000",
        ),
        (["down", "nowhere"], "no cluster named nowhere"),
        (["exec", "0"], "missing command"),
        (["exec", "0", "--name", "nowhere", "--", "true"], "no cluster named nowhere"),
        (["exec", "0", "--name=nowhere", "--", "true"], "no cluster named nowhere"),
        (["exec", "0", "--name", "nowhere", "true"], "exec [--name NAME] NODE -- COMMAND"),
    ],
)
def test_an_impossible_request_is_one_line(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", *argv]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert len(err.splitlines()) == 1
