"""The clocks of workers on several machines, which drift apart."""

from __future__ import annotations

import threading

import pytest

import toy_replicas as toy
from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.config import RunConfig
from paceline.strategies.options import create_strategy
from paceline.training import coordination
from paceline.training.coordination import (
    FIRST_CLOCK_SECONDS,
    ClockOffset,
    OffsetSample,
    StepCoordinator,
)

DRIFT = 20e-6
AHEAD_SECONDS = 7.0
STEPS = [1.0] * 15 + [10.0] * 12 + [60.0] * 55
"""Over an hour, in seconds between two exchanges."""
WHOLE_SECONDS = range(1, int(FIRST_CLOCK_SECONDS) + 1)


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
    monkeypatch.setattr(coordination, "perf_counter", clocks, raising=False)

    def work(communicator: Communicator) -> float:
        clocks.rank = communicator.rank
        replica = toy.replica(communicator, toy.sgd())
        team = StepCoordinator(RunConfig(), create_strategy("allreduce", {}), replica)
        for seconds in STEPS:
            clocks.true_seconds += seconds
            began = clocks()
            replica.exposed.note(began, began + 0.5)
            team.after_step(1.0, 1, stop=False)
        return replica.clock.seconds["wait"]

    # Until the second measurement nothing is known of the drift.
    unknown_seconds = sum(DRIFT * second for second in WHOLE_SECONDS)
    for waited in in_process.run(2, work):
        assert 0 <= waited <= unknown_seconds + 1e-6


@pytest.mark.parametrize(
    ("moment", "seconds"),
    [(5.0, 1.0), (10.0, 1.0), (15.0, 1.5), (20.0, 2.0), (30.0, 2.0), (40.0, 2.0), (60.0, 2.0)],
)
def test_the_offset_is_interpolated_and_goes_on_with_the_last_drift(
    moment: float, seconds: float
) -> None:
    offset = ClockOffset(OffsetSample(10.0, 1.0))
    offset.add(OffsetSample(20.0, 2.0))
    offset.add(OffsetSample(40.0, 2.0))
    assert offset.at(moment) == pytest.approx(seconds)


def test_the_offset_goes_on_with_the_drift_of_the_last_two_measurements() -> None:
    offset = ClockOffset(OffsetSample(10.0, 1.0), OffsetSample(20.0, 2.0))
    assert offset.at(30.0) == pytest.approx(3.0)
