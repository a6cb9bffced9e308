"""DDP exchanges are counted once, in their own step."""

from __future__ import annotations

import pytest

from paceline.comm.communicator import Communicator
from paceline.comm.in_process import InProcessGroup
from paceline.measure.timeline import Moment, Timeline
from paceline.strategies.ddp import ExchangeMeter
from paceline.strategies.replica import Replica
from paceline.training.steady import SteadyPhases
from tests.support import toy_replicas as toy


class SetTimeline(Timeline):
    """Timeline of a device whose time the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> Moment:
        return self.now


@pytest.fixture
def communicator() -> Communicator:
    return InProcessGroup(2).communicators[0]


@pytest.fixture
def replica(communicator: Communicator) -> Replica:
    return toy.replica(communicator, toy.sgd())


def exchange(meter: ExchangeMeter, timeline: SetTimeline, seconds: float) -> None:
    """One bucket without overlap."""
    under_way = meter.timer.begin()
    timeline.now += seconds
    under_way.ended = timeline.mark()


@pytest.mark.parametrize("is_nccl", [False, True])
def test_first_and_last_step_count_their_own_exchange(replica: Replica, is_nccl: bool) -> None:
    timeline = SetTimeline()
    meter = ExchangeMeter(replica, timeline, is_nccl=is_nccl)
    steady = SteadyPhases(replica.clock, replica)
    for seconds in (100.0, 1.0, 2.0, 4.0):
        exchange(meter, timeline, seconds)
        meter.end_step()
        steady.first_done(meter.settle)
    meter.settle()
    steady.end()
    after_first = steady.to_dict()
    assert after_first is not None
    assert after_first["phases"]["exchange"] == 7.0
    assert replica.clock.seconds["exchange"] == 107.0


def test_settling_twice_counts_a_step_once(replica: Replica) -> None:
    timeline = SetTimeline()
    meter = ExchangeMeter(replica, timeline, is_nccl=True)
    exchange(meter, timeline, 3.0)
    meter.end_step()
    for _ in range(2):
        meter.settle()
    assert replica.clock.seconds["exchange"] == 3.0


@pytest.mark.parametrize(("is_nccl", "expected"), [(True, 3.0), (False, 0.0)])
def test_only_nccl_transfers_add_their_seconds_to_the_traffic(
    replica: Replica, communicator: Communicator, is_nccl: bool, expected: float
) -> None:
    """Other backends time their transfers in the communicator."""
    timeline = SetTimeline()
    meter = ExchangeMeter(replica, timeline, is_nccl=is_nccl)
    exchange(meter, timeline, 3.0)
    meter.end_step()
    meter.settle()
    assert communicator.traffic.counts["gradients"].seconds == expected
