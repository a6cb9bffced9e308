"""Runs in an emulated cluster: the same training, honest records, and a bounded end by any fault.

tests/support/leaks.py checks after every test that no process is left; the cluster's own tests
check that the cluster leaves none.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.config import from_mapping
from paceline.config.cluster_spec import ClusterSpec
from paceline.emulation.cluster import EmulatedCluster
from paceline.emulation.state import all_paths
from paceline.launch import launcher
from paceline.launch.remote import run as remote
from paceline.launch.remote.machines import EmulatedMachines
from paceline.launch.result import RunOutcome
from paceline.launch.signals import SignalMonitor
from paceline.records import Result, RunFolder, read_json
from tests.support.commands import (
    ENDLESS,
    LIMIT_SECONDS,
    TINY,
    Command,
    Ended,
    alongside,
    is_training,
    names_in,
    train,
    wait_until,
)
from tests.support.node_commands import CUT_SECONDS, interrupt_link, set_link

pytestmark = [pytest.mark.root, pytest.mark.iproute, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    with EmulatedCluster.up(ClusterSpec(nodes=2), calibrate=False) as cluster:
        yield cluster


PATIENT = {"rendezvous_seconds": LIMIT_SECONDS, "timeout_seconds": LIMIT_SECONDS}
"""All nodes are this one machine, and load torch at the same time."""


def run_in(cluster: EmulatedCluster, out: Path, **settings: Any) -> RunOutcome:
    assert Command.starter is not None
    fleet = EmulatedMachines(cluster, Command.starter.fork_server)
    values = {**TINY, **PATIENT, "cluster": "nodes=2", "out": str(out), "name": "run"}
    config = from_mapping({**values, **settings})
    with SignalMonitor() as signals:
        return remote.run_on(fleet, config, None, True, signals)


@contextlib.contextmanager
def disturbed(folder: Path, disturb: Callable[[], None]) -> Iterator[None]:
    """Do something to a run that this process starts inside the block, once both nodes train."""

    def strike() -> None:
        wait_until(lambda: is_training(folder), "both nodes train")
        disturb()

    with alongside(strike):
        yield


def run_through_a_cut(
    cluster: EmulatedCluster, out: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> RunOutcome:
    """While the second node's link is down for a while."""
    monkeypatch.setenv("OWN_SLEEP_SECONDS", "0.3")
    with disturbed(out / "run", lambda: interrupt_link(cluster, 1)):
        return run_in(cluster, out, model="user_code:Slow", **settings)


def check_undisturbed(result: Result | None, undisturbed: tuple[Path, Ended]) -> None:
    """It has the weights of a run that nothing happened to."""
    assert result is not None
    assert (result["status"], result["iterations"]) == ("finished", 12)
    assert result["weights_sha256"] == read_json(undisturbed[0] / "result.json")["weights_sha256"]


def processes(cluster: EmulatedCluster, node: int, name: str = "") -> list[psutil.Process]:
    """Those whose names begin like this."""
    found = []
    for pid in cluster.processes(node):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.name().startswith(name):
                found.append(process)
    return found


def kill_all(victims: list[psutil.Process]) -> None:
    assert victims
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def check_failed(outcome: RunOutcome, cause: str) -> None:
    assert outcome.exit_code == 1
    result = read_json(outcome.folder.result_file)
    assert result == outcome.result
    assert result["status"] == "failed"
    assert result["cause"].startswith(cause)
    assert result["cluster"]["asked"]["nodes"] == 2
    passing = ("launch-", "report-", "failure-", "output-")
    assert not [name for name in names_in(outcome.folder.path) if name.startswith(passing)]


def test_what_a_ring_sends_is_what_the_nodes_interfaces_count(
    cluster: EmulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_NOTES", str(tmp_path / "run"))
    settings = {"model": "user_code:Wide", "strategy": "ring", "iterations": 10}
    result = run_in(cluster, tmp_path, **settings, eval_every="never").result
    assert result is not None
    assert result["config"]["threads"] is None, "nobody asked for any"
    for worker, node in zip(result["workers"], result["nodes"], strict=True):
        counted = sum(kind["bytes_sent"] for kind in worker["traffic"].values())
        # Two nodes: each sends half of the gradient to be added up, and half of the sum.
        assert counted > 10 * 480_003 * 4
        on_wire = node["network_bytes_sent"] - node["loopback_bytes_sent"]
        assert counted <= on_wire <= 1.05 * counted


@pytest.mark.quotas
def test_a_run_that_describes_its_cluster_gets_it_and_leaves_nothing_of_it(
    tmp_path: Path, talkative_run: tuple[Path, Ended]
) -> None:
    """From the command line, stopped by Ctrl-C and resumed, in a new cluster each time."""
    before = [path for path in all_paths() if path.name.startswith(f"run-{os.getpid()}-")]
    spec = "nodes=2,cpus=0.9,bandwidth=1gbit"
    settings = {"model": "user_code:Slow", "cluster": spec, "checkpoint_every": 100, **PATIENT}
    with train(tmp_path, {"OWN_SLEEP_SECONDS": "0.5"}, **settings) as command:
        wait_until(lambda: is_training(tmp_path / "run"), "both nodes train")
        command.process.send_signal(signal.SIGINT)
        ended = command.end()
    stopped = read_json(tmp_path / "run" / "result.json")
    cause = f"stopped by SIGINT after iteration {stopped['iterations']}"
    assert (ended.code, stopped["status"], stopped["cause"]) == (130, "stopped", cause)
    assert ended.err.splitlines()[-2:] == [
        f"paceline: {cause}",
        f"paceline: resume with `paceline train --resume {tmp_path / 'run'}`",
    ]

    result = launcher.resume(str(tmp_path / "run"), {}, quiet=True).result
    assert result is not None
    assert (result["status"], result["cause"]) == ("finished", None)
    one_machine = read_json(talkative_run[0] / "result.json")
    assert result["weights_sha256"] == one_machine["weights_sha256"]
    assert RunFolder(tmp_path / "run").read_config().cluster == spec
    assert result["cluster"]["asked"]["cpus"] == 0.9
    assert {item["what"] for item in result["cluster"]["got"]} >= {"bandwidth out", "cpus"}
    assert result["hardware"]["cores"] == 1, "of a node, whose quota bounds its threads"
    # Clusters of other programs have names of any kind.
    starters = tuple(f"run-{pid}-" for pid in (os.getpid(), command.process.pid))
    left = [path for path in all_paths() if path.name.startswith(starters)]
    assert left == before


def test_a_killed_worker_ends_the_run(
    cluster: EmulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_SLEEP_SECONDS", "0.05")
    strike = lambda: kill_all(processes(cluster, 1, "worker"))  # noqa: E731
    with disturbed(tmp_path / "run", strike):
        outcome = run_in(cluster, tmp_path, **ENDLESS)
    check_failed(outcome, "rank 1 was killed by SIGKILL")


@pytest.mark.parametrize("node", [1, 0])
def test_a_killed_node_ends_the_run(
    node: int, cluster: EmulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_SLEEP_SECONDS", "0.05")
    with disturbed(tmp_path / "run", lambda: kill_all(processes(cluster, node))):
        outcome = run_in(cluster, tmp_path, **ENDLESS)
    check_failed(outcome, f"node {node} ({cluster.addresses[node]}) was killed by SIGKILL")


def test_a_link_that_stays_down_ends_the_run(
    cluster: EmulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_SLEEP_SECONDS", "0.05")
    try:
        with disturbed(tmp_path / "run", lambda: set_link(cluster, 1, "down")):
            outcome = run_in(cluster, tmp_path, **ENDLESS, timeout_seconds=6)
    finally:
        set_link(cluster, 1, "up")
    check_failed(outcome, "lost contact with node 1")


def test_a_link_that_recovers_has_no_effect(
    cluster: EmulatedCluster,
    talkative_run: tuple[Path, Ended],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is lost: TCP sends again what did not arrive."""
    result = run_through_a_cut(cluster, tmp_path, monkeypatch).result
    check_undisturbed(result, talkative_run)
    assert result is not None
    assert max(worker["wall_seconds"] for worker in result["workers"]) > CUT_SECONDS
