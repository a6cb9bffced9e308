"""Exchanges of strategies that overlap the backward pass are counted once, in their own step."""

from __future__ import annotations

import pytest

from paceline.comm.communicator import Communicator
from paceline.comm.in_process import InProcessGroup
from paceline.strategies.exchange_meter import ExchangeMeter
from paceline.strategies.replica import Replica
from paceline.training.steady import SteadyPhases
from tests.support import toy_replicas as toy
from tests.support.gpu_marks import FakeGpuTimeline


@pytest.fixture
def communicator() -> Communicator:
    return InProcessGroup(2).communicators[0]


@pytest.fixture
def replica(communicator: Communicator) -> Replica:
    return toy.replica(communicator, toy.sgd())


@pytest.fixture
def timeline() -> FakeGpuTimeline:
    return FakeGpuTimeline()


@pytest.fixture
def meter(replica: Replica, timeline: FakeGpuTimeline) -> ExchangeMeter:
    return ExchangeMeter(replica, timeline)


def exchange(meter: ExchangeMeter, timeline: FakeGpuTimeline, seconds: float) -> None:
    """One bucket."""
    transfer = meter.begin()
    timeline.now += seconds
    transfer.ended = timeline.mark()


def test_first_and_last_step_count_their_own_exchange(
    replica: Replica, meter: ExchangeMeter, timeline: FakeGpuTimeline
) -> None:
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


def test_settling_twice_counts_a_step_once(
    replica: Replica, meter: ExchangeMeter, timeline: FakeGpuTimeline
) -> None:
    exchange(meter, timeline, 3.0)
    meter.end_step()
    for _ in range(2):
        meter.settle()
    assert replica.clock.seconds["exchange"] == 3.0


def test_step_is_accounted_for_once_the_gpu_has_passed_it(
    replica: Replica, meter: ExchangeMeter, timeline: FakeGpuTimeline
) -> None:
    seconds = []
    for _ in range(2):
        exchange(meter, timeline, 3.0)
        timeline.marks[-1].is_passed = False
        meter.end_step()
        seconds.append(replica.clock.seconds["exchange"])
        timeline.marks[-1].is_passed = True
    assert seconds == [0.0, 3.0]


def test_communication_before_the_end_of_the_backward_pass_is_overlapped(
    replica: Replica, meter: ExchangeMeter, timeline: FakeGpuTimeline
) -> None:
    exchange(meter, timeline, 3.0)
    backward_ended = timeline.mark()
    exchange(meter, timeline, 2.0)
    meter.end_step(backward_ended)
    meter.settle()
    assert replica.hidden_exchange_seconds == 3.0
    # Exposed communication is measured by the phase clock.
    assert replica.clock.seconds["exchange"] == 0.0


def test_each_replay_of_a_captured_step_is_accounted_for(
    replica: Replica, meter: ExchangeMeter, timeline: FakeGpuTimeline
) -> None:
    with meter.capture() as captured:
        exchange(meter, timeline, 1000.0)
        meter.end_step()
    assert replica.clock.seconds["exchange"] == 0.0
    for moments in ([1.0, 2.0], [10.0, 12.0], [20.0, 24.0]):
        meter.before_replay(captured)
        timeline.replay(timeline.marks, moments)
        meter.replayed(captured)
    meter.settle()
    assert replica.clock.seconds["exchange"] == 1 + 2 + 4
    assert [*replica.exposed.began] == [1.0, 10.0, 20.0]
