"""Clock offsets between workers on several machines whose clocks drift."""

from __future__ import annotations

import random
import threading

import pytest

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.config import RunConfig
from paceline.strategies import create_strategy
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import StepMeter
from paceline.training import coordination
from paceline.training.coordination import (
    MAX_CLOCK_INTERVAL_SECONDS,
    MAX_DRIFT,
    MIN_CLOCK_INTERVAL_SECONDS,
    ClockOffset,
    OffsetSample,
    StepCoordinator,
    attribute_waits,
    measure_clock_offset,
)
from tests.support import toy_replicas as toy

DRIFT = 20e-6
AHEAD_SECONDS = 7.0
STEPS = [1.0] * 15 + [10.0] * 12 + [60.0] * 55
"""Over an hour, in seconds between two exchanges."""
WHOLE_SECONDS = range(1, int(MIN_CLOCK_INTERVAL_SECONDS) + 1)


class DriftingClocks(threading.local):
    """Every worker (a thread) moves its own copy of the true time; rank 1's clock is fast."""

    rank = 0
    true_seconds = 1000.0

    def __call__(self) -> float:
        if self.rank == 0:
            return self.true_seconds
        return AHEAD_SECONDS + self.true_seconds * (1 + DRIFT)


def test_drifting_clocks_do_not_turn_communication_into_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both workers come to every exchange at the same time."""
    clocks = DriftingClocks()
    monkeypatch.setattr(coordination, "perf_counter", clocks)

    def work(communicator: Communicator) -> float:
        clocks.rank = communicator.rank
        replica = toy.replica(communicator, toy.sgd(), node=communicator.rank)
        coordinator = StepCoordinator(RunConfig(), create_strategy("allreduce", {}), replica)
        coordinator.start()
        for seconds in STEPS:
            clocks.true_seconds += seconds
            began = clocks()
            replica.exposed.add(began, began + 0.5)
            coordinator.after_step(1.0, 1, stop=False)
        return replica.clock.seconds["wait"]

    # The drift is unknown until the second measurement.
    unknown_seconds = sum(DRIFT * second for second in WHOLE_SECONDS)
    for waited in in_process.run(2, work):
        assert 0 <= waited <= unknown_seconds + 1e-6


class LateMeter(StepMeter):
    """Has one exposed interval that is known only after `settle`."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def settle(self) -> None:
        self._replica.exposed.add(1.0 + self._replica.communicator.rank, 4.0)


def test_waits_include_steps_that_the_meter_settles_late() -> None:
    """A strategy creates its meter in its setup, after the coordinator was created."""

    def work(communicator: Communicator) -> float:
        replica = toy.replica(communicator, toy.sgd())
        strategy = create_strategy("allreduce", {})
        coordinator = StepCoordinator(RunConfig(), strategy, replica)
        strategy.meter = LateMeter(replica)
        coordinator.start()
        coordinator.settle()
        return replica.clock.seconds["wait"]

    assert in_process.run(2, work) == pytest.approx([1.0, 0.0])


def test_a_rank_is_waited_for_until_it_issues_what_others_wait_for() -> None:
    """Rank 1 issues it a second later than rank 0, and waits for it from then to 4.5 s."""

    def work(communicator: Communicator) -> float:
        replica, rank = toy.replica(communicator, toy.sgd()), communicator.rank
        replica.exposed.add(3.0 if rank == 0 else 4.0, 4.5, arrived=2.5 + rank)
        attribute_waits(communicator, replica.clock, replica.exposed, ClockOffset())
        return replica.clock.seconds["wait"]

    # The rest is communication: all have arrived.
    assert in_process.run(2, work) == pytest.approx([0.5, 0.0])


@pytest.mark.parametrize(
    ("moment", "microseconds"),
    [(5.0, 100), (10.0, 100), (15.0, 150), (20.0, 200), (30.0, 220), (40.0, 240), (70.0, 380)],
)
def test_offset_is_interpolated_then_extrapolated_with_the_measured_drift(
    moment: float, microseconds: float
) -> None:
    offset = ClockOffset(OffsetSample(10.0, 100e-6))
    offset.add(OffsetSample(20.0, 200e-6))
    offset.add(OffsetSample(40.0, 240e-6))
    assert offset.at(moment) * 1e6 == pytest.approx(microseconds)


def test_drift_is_limited() -> None:
    offset = ClockOffset(OffsetSample(10.0, 1.0), OffsetSample(20.0, 2.0))
    assert offset.at(30.0) == pytest.approx(2.0 + 10 * MAX_DRIFT)


NOISE_SECONDS = 0.25e-3


def test_measurement_noise_is_not_amplified() -> None:
    """Clocks that do not drift, measured with an error, at the intervals of a run."""
    noise = random.Random(0)
    for _ in range(200):
        samples: list[OffsetSample] = []
        moment, interval = 0.0, MIN_CLOCK_INTERVAL_SECONDS
        while moment < 600:
            error = noise.uniform(-NOISE_SECONDS, NOISE_SECONDS)
            samples.append(OffsetSample(moment, error, NOISE_SECONDS))
            offset = ClockOffset(*samples)
            moment += interval
            interval = min(2 * interval, MAX_CLOCK_INTERVAL_SECONDS)
            # Just before the next measurement.
            assert abs(offset.at(moment)) <= NOISE_SECONDS


def test_drift_above_the_measurement_error_is_corrected() -> None:
    noise = random.Random(0)

    def measure(moment: float) -> OffsetSample:
        error = noise.uniform(-NOISE_SECONDS, NOISE_SECONDS)
        return OffsetSample(moment, DRIFT * moment + error, NOISE_SECONDS)

    offset = ClockOffset(*(measure(120.0 * number) for number in range(11)))
    worst_drift_seconds = 120 * 2 * NOISE_SECONDS / 1200
    expected = pytest.approx(DRIFT * 1320, abs=NOISE_SECONDS + worst_drift_seconds)
    assert offset.at(1320.0) == expected


@pytest.mark.parametrize(("nodes", "has_offset"), [((0, 0), False), ((0, 1), True)])
def test_ranks_on_the_node_of_rank_0_have_no_offset(
    nodes: tuple[int, int], has_offset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = DriftingClocks()
    monkeypatch.setattr(coordination, "perf_counter", clocks)

    def work(communicator: Communicator) -> float:
        clocks.rank = communicator.rank
        return measure_clock_offset(communicator, nodes[communicator.rank]).seconds

    first, second = in_process.run(2, work)
    assert (first, second != 0) == (0, has_offset)
