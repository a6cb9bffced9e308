"""Elastic runs in an emulated cluster, of which a node is cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.emulation.cluster import EmulatedCluster
from tests.launch.test_cluster_runs import (
    check_undisturbed,
    cluster,
    disturbed,
    run_in,
    run_through_a_cut,
)
from tests.support.commands import Ended
from tests.support.node_commands import set_link

__all__ = ["cluster"]

pytestmark = [pytest.mark.root, pytest.mark.iproute, pytest.mark.timeout(300)]


def test_the_run_continues_without_a_disconnected_node(
    cluster: EmulatedCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """No error reports that the link is down: nodes and workers only receive nothing."""
    monkeypatch.setenv("OWN_SLEEP_SECONDS", "0.1")
    settings = {"model": "user_code:Slow", "iterations": 60, "checkpoint_every": 5}
    try:
        with disturbed(tmp_path / "run", lambda: set_link(cluster, 1, "down")):
            outcome = run_in(cluster, tmp_path, elastic="1:2", **settings)
    finally:
        set_link(cluster, 1, "up")
    assert outcome.result is not None
    assert (outcome.result["status"], outcome.result["iterations"]) == ("finished", 60)
    assert [world["workers"] for world in outcome.result["worlds"]] == [2, 1]
    [restart] = outcome.result["restarts"]
    assert restart["cause"] == "node 1 lost (no heartbeat for 6 s)"
    message = capfd.readouterr().err
    assert "continuing without node 1: lost contact with the first node" in message


def test_a_link_that_recovers_does_not_change_the_weights(
    cluster: EmulatedCluster,
    talkative_run: tuple[Path, Ended],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that is silent for six seconds is lost, so it may cost a restart, and no more."""
    settings = {"elastic": "2:2", "checkpoint_every": 1}
    result = run_through_a_cut(cluster, tmp_path, monkeypatch, **settings).result
    check_undisturbed(result, talkative_run)
    assert result is not None
    assert len(result["restarts"]) <= 1
