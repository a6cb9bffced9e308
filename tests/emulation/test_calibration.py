"""Calibration: its warnings, and what a real measurement finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config.cluster_spec import parse
from paceline.emulation import calibration, network
from paceline.emulation.state import Calibration, ClusterState, Measured, load
from tests.support.node_commands import small_cluster


def test_only_deviations_over_ten_percent_are_reported() -> None:
    near = Measured("cpus", 0, 0.5, 0.46, "cores")
    off = Measured("round trip", None, 0.001, 0.0012, "s")
    slow = Measured("bandwidth in", 3, 1e9, 8.723e8, "bit/s")
    warnings = Calibration([near, off, slow]).warnings()
    assert warnings == [
        "emulated cluster: round trip measured at 0.0012 s, +20% from the requested 0.001 s",
        "emulated cluster: bandwidth in (node 3) measured at 872.3 Mbit/s, -13% from the"
        " requested 1 Gbit/s",
    ]


def test_without_a_request_there_is_no_deviation() -> None:
    assert not Measured("round trip", None, None, 0.5, "s").is_off


def test_measuring_again_stops_at_the_first_that_is_near() -> None:
    tries = iter([Measured("cpus", 0, 1.0, got, "cores") for got in (0.2, 0.95, 1.0)])
    assert calibration._closest(tries).got == 0.95
    assert next(tries).got == 1.0


def test_cpu_shares_are_measured_again_if_one_is_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rounds = iter([(0.5, 0.1), (0.2, 0.4), (0.48, 0.3)])

    def measure(state: ClusterState) -> list[Measured]:
        return [Measured("cpus", node, 0.5, got, "cores") for node, got in enumerate(next(rounds))]

    monkeypatch.setattr(calibration, "_cpus_at_once", measure)
    state = ClusterState(tmp_path / "name.json", parse("nodes=2,cpus=0.5"))
    assert [item.got for item in calibration._cpus(state)] == [0.5, 0.4]
    assert next(rounds, None) is None


@pytest.mark.root
@pytest.mark.iproute
@pytest.mark.quotas
def test_a_cluster_is_measured_link_by_link_and_node_by_node() -> None:
    with small_cluster("nodes=2,cpus=0.5,bandwidth=50mbit/1:10mbit,slow=1:0.5") as cluster:
        found = calibration.calibrate(cluster.state)
        cluster.state.calibration = found
        cluster.state.save()
        assert load(cluster.state.path).calibration == found
    asked = {(item.what, item.node): item.asked for item in found.measured}
    assert asked == {
        ("bandwidth out", 0): 50e6,
        ("bandwidth in", 0): 50e6,
        ("bandwidth out", 1): 10e6,
        ("bandwidth in", 1): 10e6,
        ("round trip", None): None,
        ("cpus", 0): 0.5,
        ("cpus", 1): 0.25,
    }
    assert all(item.got > 0 for item in found.measured)
    # Shaped: without that, links carry gigabits and a busy loop takes a whole core.
    assert all(item.got < 2 * item.asked for item in found.measured if item.asked)


def test_a_token_bucket_limits_tcp_payload_to_the_requested_rate() -> None:
    words = network.token_bucket(1e9).split()
    rate = int(words[words.index("rate") + 1].removesuffix("bit"))
    assert rate * 1448 / 1514 == pytest.approx(1e9)


def test_addresses_pass_over_networks_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_routes", list)
    monkeypatch.setattr(network, "_networks_of_other_clusters", list)
    first = network.addresses("name", 3)
    assert len(set(first)) == 3
    monkeypatch.setattr(network, "_routes", lambda: [first[0].rsplit(".", 1)[0] + ".0/24"])
    assert not set(network.addresses("name", 3)) & set(first)


@pytest.mark.parametrize(
    ("routes", "begin"),
    [(["10.0.0.0/8"], "198.1"), (["0.0.0.0/1", "128.0.0.0/1"], "10.")],
    ids=["to all of 10.0.0.0/8", "to everything"],
)
def test_routes_do_not_keep_a_cluster_from_addresses(
    routes: list[str], begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a company's network; a clash does no harm, since nodes are cut off from it."""
    monkeypatch.setattr(network, "_routes", lambda: routes)
    monkeypatch.setattr(network, "_networks_of_other_clusters", list)
    first = network.addresses("name", 3)
    assert all(address.startswith(begin) for address in first)
    other = first[0].rsplit(".", 1)[0] + ".0/24"
    monkeypatch.setattr(network, "_networks_of_other_clusters", lambda: [other])
    assert not set(network.addresses("name", 3)) & set(first)
