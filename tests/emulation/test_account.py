"""What a result says of the emulated cluster that its run was in."""

from __future__ import annotations

from pathlib import Path

from paceline.config.cluster_spec import parse
from paceline.emulation.state import Calibration, ClusterState, Measured, cluster_record


def test_the_record_has_measurements_and_warnings(tmp_path: Path) -> None:
    """Cores that others kept busy make them doubtful; delays are made in two different ways."""
    state = ClusterState(tmp_path / "name.json", parse("nodes=2,latency=1ms"), delay="forwarder")
    measured = Measured("round trip", None, 0.001, 0.002, "s")
    state.calibration = Calibration([measured], busy_cores=1.5)
    state.create()
    account = cluster_record(str(state.path))
    assert account is not None
    assert (account["busy_cores"], account["delayed_by"]) == (1.5, "forwarder")
    assert account["got"][0]["got"] == 0.002
    assert "+100% from the requested" in account["warnings"][0]


def test_a_cluster_that_is_gone_is_a_warning(tmp_path: Path) -> None:
    account = cluster_record(str(tmp_path / "name.json"))
    assert account is not None
    assert account["asked"] is None
    assert "no cluster named name" in account["warnings"][0]
