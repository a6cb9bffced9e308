"""The simulation of large clusters: equal to the simulation of every message, and fast."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.plan.calibration import Gradient
from paceline.plan.cluster_simulation import (
    Day,
    Failures,
    Floats,
    Racks,
    VectorizedCollectives,
    racks_factor,
    simulate_cluster_step,
    simulate_day,
)
from paceline.plan.collective_cost import CollectiveTime, RoundTimes
from paceline.plan.job import Compute, Job
from tests.support.message_simulation import Network, messages_of, simulate

LATENCY, RATE = 1e-4, 1.25e9
LINEAR = RoundTimes(LATENCY, 1 / RATE)
GRADIENTS = tuple(Gradient(size, ready) for size, ready in ((2_000_000, 1.0), (9_000_000, 0.4)))
STRATEGIES = [
    "gather_scatter", "allreduce", "ring", "tree", "halving_doubling", "overlap", "ddp", "sharded",
]  # fmt: skip


def job(
    strategy: str, workers: int, hosts: int | None = None, options: dict[str, str] | None = None
) -> Job:
    return Job(
        strategy, options or {}, workers, hosts or workers, GRADIENTS, 0,
        Compute(0.001, 0.01, 0.02, 0.002), lambda *_: CollectiveTime(0.0, 0.0),
    )  # fmt: skip


def factors(workers: int) -> Floats:
    return np.random.default_rng(workers).lognormal(0.0, 0.2, workers)


def messages(
    network: Network, starts: Floats, operation: str, algorithm: str, size: float
) -> Floats:
    rounds = messages_of(operation, algorithm, len(starts), size)
    return np.array(simulate(rounds, network, list(starts)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workers", [4, 6, 16, 64])
def test_a_step_equals_that_of_every_message(strategy: str, workers: int) -> None:
    network = Network(LATENCY, RATE)
    exact = simulate_cluster_step(
        job(strategy, workers), factors(workers), lambda *each: messages(network, *each)
    )
    fast = simulate_cluster_step(
        job(strategy, workers), factors(workers), VectorizedCollectives(lambda *_: LINEAR)
    )
    assert fast.max() == pytest.approx(exact.max(), rel=0.01)


@pytest.mark.parametrize("strategy", ["ring", "tree", "halving_doubling", "gather_scatter"])
@pytest.mark.parametrize(
    ("workers", "racks"),
    # In small racks, the uplink limits what the root receives.
    [(8, Racks(2, 4.0)), (16, Racks(4, 4.0)), (64, Racks(8, 2.0))],
)
def test_racks_slow_messages_between_them(strategy: str, workers: int, racks: Racks) -> None:
    network = Network(LATENCY, RATE, racks.size, racks.oversubscription)
    same = np.ones(workers)
    exact = simulate_cluster_step(
        job(strategy, workers), same, lambda *each: messages(network, *each)
    )
    fast = simulate_cluster_step(
        job(strategy, workers), same, VectorizedCollectives(lambda *_: LINEAR, racks)
    )
    assert fast.max() == pytest.approx(exact.max(), rel=0.01)


def test_oversubscription_hurts_the_algorithm_that_crosses_racks_most() -> None:
    def slowdown(strategy: str) -> float:
        plain, racks = (
            simulate_cluster_step(
                job(strategy, 64), np.ones(64), VectorizedCollectives(lambda *_: LINEAR, each)
            ).max()
            for each in (None, Racks(8, 8.0))
        )
        return float(racks / plain)

    assert slowdown("ring") == pytest.approx(1.0)
    assert slowdown("halving_doubling") > 1.2


def test_racks_hold_hosts() -> None:
    """However many workers the hosts have; one host needs no uplink."""

    def factor(workers: int, hosts: int, size: int) -> float:
        return racks_factor(
            job("halving_doubling", workers, hosts), lambda *_: LINEAR, Racks(size, 8.0)
        )

    assert factor(64, 64, 8) > 1.2
    assert factor(64, 8, 8) == 1.0
    assert factor(64, 1, 1) == 1.0
    assert factor(64, 16, 8) > 1.0


def test_buckets_cross_racks_by_their_algorithm() -> None:
    def factor(options: dict[str, str]) -> float:
        return racks_factor(job("overlap", 64, options=options), lambda *_: LINEAR, Racks(8, 8.0))

    assert factor({}) == pytest.approx(1.0)
    assert factor({"algorithm": "halving_doubling"}) > 1.2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ten_thousand_workers_are_simulated(strategy: str) -> None:
    """Time and memory are in benchmarks; here, a straggler must delay everyone."""
    workers = 10_000
    slow = np.ones(workers)
    slow[workers // 2] = 3.0
    collectives = VectorizedCollectives(lambda *_: LINEAR, Racks(40, 4.0))
    ends = simulate_cluster_step(job(strategy, workers), slow, collectives)
    even = simulate_cluster_step(job(strategy, workers), np.ones(workers), collectives)
    assert ends.min() > even.max() * 0.99
    assert ends.max() - even.max() <= 2 * 0.034


def test_a_day_adds_up_and_agrees_with_the_formula_of_young() -> None:
    workers, random = 1000, np.random.default_rng(0)
    failures = Failures(20_000.0, 1800.0, 30.0, 120.0)
    day = Day.mean([simulate_day(workers, failures, random) for _ in range(200)])
    assert day.goodput + day.checkpoints + day.lost + day.restarts == pytest.approx(1.0)
    rate = workers / (20_000 * 3600)
    # Failures while training; half a cycle is lost at each.
    running = 1 / (1 + rate * 120)
    expected = running * 1800 / 1830 * math.exp(-rate * 1830 / 2)
    assert day.goodput == pytest.approx(expected, abs=0.005)


def test_without_failures_only_checkpoints_cost_time() -> None:
    day = simulate_day(8, Failures(1e12, 900.0, 9.0, 60.0), np.random.default_rng(0))
    assert day.failures == 0
    assert day.goodput == pytest.approx(900 / 909, abs=1e-3)
    assert day.lost == day.restarts == 0.0
