"""Several workers per host: equal to the simulation of every message within and between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.comm.algorithms import ALGORITHMS
from paceline.plan.collective_cost import RoundTimes
from paceline.plan.collective_times import Place
from paceline.plan.host_levels import Level, levels_of
from paceline.plan.links import Link
from paceline.plan.prediction import Predictor
from paceline.plan.target import Target
from tests.support.calibrations import LINK, calibration, timing
from tests.support.message_simulation import Message, Network, messages_of, simulate

LATENCY, RATE = 1e-3, 1e8
LOCAL_LATENCY, LOCAL_RATE = 1e-4, 2e9
WITHIN, ACROSS = RoundTimes(LOCAL_LATENCY, 1 / LOCAL_RATE), RoundTimes(LATENCY, 1 / RATE)
HOSTS = ((2, 2), (2, 4), (3, 2), (4, 2), (4, 4), (3, 1), (1, 4))
SIZE = 1e6
GLOO, HIERARCHICAL = (Place(backend, True, Link(8e8)) for backend in ("gloo", "hierarchical"))


def network(per_host: int) -> Network:
    return Network(
        LATENCY,
        RATE,
        workers_per_host=per_host,
        local_latency_seconds=LOCAL_LATENCY,
        local_bytes_per_second=LOCAL_RATE,
    )


def seconds(levels: Sequence[Level]) -> float:
    return sum(
        (ACROSS if level.place.is_across_hosts else WITHIN).time(level.rounds).seconds
        for level in levels
    )


@pytest.mark.parametrize(("hosts", "per_host"), HOSTS)
@pytest.mark.parametrize("algorithm", [entry.name for entry in ALGORITHMS])
def test_algorithms_take_as_long_as_their_messages(
    algorithm: str, hosts: int, per_host: int
) -> None:
    workers = hosts * per_host
    place = replace(GLOO, is_across_hosts=hosts > 1)
    levels = levels_of("all_reduce", algorithm, workers, hosts, SIZE, place)
    rounds = messages_of("all_reduce", algorithm, workers, SIZE)
    exact = max(simulate(rounds, network(per_host), [0.0] * workers))
    assert seconds(levels) == pytest.approx(exact, rel=0.01)


def two_level_messages(operation: str, hosts: int, per_host: int) -> list[list[Message]]:
    """As comm/hierarchical.py performs it, with rings on both levels."""
    workers = range(hosts * per_host)

    def right(rank: int) -> int:
        return rank - rank % per_host + (rank % per_host + 1) % per_host

    inner = [(rank, right(rank), SIZE / per_host) for rank in workers]
    outer = [(rank, (rank + per_host) % len(workers), SIZE / per_host / hosts) for rank in workers]
    within, between = [inner] * (per_host - 1), [outer] * (hosts - 1)
    return {
        "all_reduce": [*within, *between, *between, *within],
        "reduce_scatter": [*within, *between],
        "all_gather": [*between, *within],
    }[operation]


@pytest.mark.parametrize(("hosts", "per_host"), [case for case in HOSTS if min(case) > 1])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_hierarchical_collectives_use_both_levels(
    operation: str, hosts: int, per_host: int
) -> None:
    workers = hosts * per_host
    levels = levels_of(operation, "library", workers, hosts, SIZE, HIERARCHICAL)
    rounds = two_level_messages(operation, hosts, per_host)
    exact = max(simulate(rounds, network(per_host), [0.0] * workers))
    assert seconds(levels) == pytest.approx(exact, rel=1e-6)
    assert {level.place.backend for level in levels} == {"shm", "gloo"}


def test_hosts_with_different_numbers_of_workers_are_one_ring() -> None:
    (level,) = levels_of("all_reduce", "library", 7, 2, SIZE, HIERARCHICAL)
    assert [(each.count, each.link_bytes) for each in level.rounds] == [(12, SIZE / 7)]


def test_plans_for_hierarchical_communicators_need_both_levels() -> None:
    """Half of the workers are on the same host: the link carries half as much per worker."""
    shared = timing("reduce_scatter", "library", 1e-5, 10e9, link=None, backend="shm")
    known = calibration()
    known = replace(known, collectives=(*known.collectives, shared))
    target = Target("ring", 8, 64, {"algorithm": "library"}, hosts=2, link=LINK)
    flat, hierarchical = (
        Predictor(known).predict(replace(target, backend=backend)).step_seconds.median
        for backend in ("gloo", "hierarchical")
    )
    assert hierarchical < 0.8 * flat


def test_link_bytes_are_those_of_the_link_of_a_host() -> None:
    size = calibration().gradient_bytes
    predictor = Predictor(calibration())

    def moved(strategy: str, hosts: int) -> float:
        target = Target(strategy, 8, 64, hosts=hosts, link=LINK)
        return predictor.predict(target).link_bytes

    assert moved("ring", 4) == moved("ring", 8) == pytest.approx(2 * 7 / 8 * size)
    # The root receives from the others, and sends to them.
    assert moved("gather_scatter", 8) == pytest.approx(7 * size)
    assert moved("gather_scatter", 4) == pytest.approx(6 * size)
    assert moved("tree", 8) == pytest.approx(3 * size)
    assert moved("parameter_server", 8) == pytest.approx(7 * size)


def test_workers_of_several_hosts_share_the_cores_of_their_host() -> None:
    two = replace(calibration(), cores_per_worker=2.0)
    one_each, two_each = (
        Predictor(two).predict(Target("ring", 4, 256, hosts=hosts, link=LINK)).step_seconds.median
        for hosts in (4, 2)
    )
    assert two_each == pytest.approx(2 * one_each, rel=0.05)
