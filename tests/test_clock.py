"""The phase clock splits wall time into phases without losing any of it."""

from __future__ import annotations

import pytest

from paceline.measure import phase_clock as clock_module
from paceline.measure.phase_clock import PhaseClock


class HandClock:
    """A clock that the test moves; whole seconds, so that sums of them are exact."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    hand = HandClock()
    monkeypatch.setattr(clock_module, "perf_counter", hand)
    return hand


def test_time_belongs_to_the_phase_that_was_entered_last(hand: HandClock) -> None:
    clock = PhaseClock()
    hand.now += 1
    clock.enter("forward")
    hand.now += 2
    clock.enter("backward")
    hand.now += 4
    clock.enter("other")
    spent = {phase: seconds for phase, seconds in clock.seconds.items() if seconds}
    assert spent == {"other": 1, "forward": 2, "backward": 4}


def test_phases_add_up_to_the_wall_time(hand: HandClock) -> None:
    clock = PhaseClock()
    for index, phase in enumerate(("input", "forward", "wait", "forward", "update", "other")):
        hand.now += index + 1
        clock.enter(phase)
    assert sum(clock.seconds.values()) == clock.wall_seconds == 21


def test_phases_add_up_to_the_wall_time_on_the_real_clock() -> None:
    clock = PhaseClock()
    for _ in range(1000):
        clock.enter("forward")
        clock.enter("backward")
    assert sum(clock.seconds.values()) == pytest.approx(clock.wall_seconds, rel=1e-9)


def test_during_returns_to_the_phase_around_it_however_deep(hand: HandClock) -> None:
    clock = PhaseClock()
    clock.enter("backward")
    with clock.during("exchange"):
        hand.now += 1
        with clock.during("wait"):
            hand.now += 2
        hand.now += 4
    hand.now += 8
    clock.enter("other")
    spent = {phase: seconds for phase, seconds in clock.seconds.items() if seconds}
    assert spent == {"exchange": 5, "wait": 2, "backward": 8}


def test_during_returns_to_the_phase_around_it_after_an_error(hand: HandClock) -> None:
    clock = PhaseClock()
    with pytest.raises(RuntimeError), clock.during("exchange"):
        raise RuntimeError
    hand.now += 3
    clock.enter("forward")
    assert clock.seconds["other"] == 3


def test_enter_returns_the_moment_of_the_change(hand: HandClock) -> None:
    clock = PhaseClock()
    hand.now = 123.0
    assert clock.enter("input") == 123.0


def test_every_change_is_counted_for_the_account_of_measuring(hand: HandClock) -> None:
    clock = PhaseClock()
    clock.enter("input")
    with clock.during("wait"):
        pass
    assert clock.switches == 3


def test_the_cost_of_a_change_is_positive() -> None:
    assert PhaseClock().seconds_per_switch(repeats=100) > 0


def test_a_lap_spans_the_phases_between_its_ends(hand: HandClock) -> None:
    clock = PhaseClock()
    for length in (1, 2):
        clock.begin_step("input")
        hand.now += length
        clock.enter("forward")
        hand.now += 4
        clock.end_step("other")
        hand.now += 8
    assert list(clock.lap_seconds) == [5, 6]


def test_a_lap_is_taken_once(hand: HandClock) -> None:
    clock = PhaseClock()
    taken = []
    for length in (1, 2):
        clock.begin_step("input")
        hand.now += length
        clock.end_step("other")
        taken.append(clock.take_laps())
    assert taken == [[1], [2]]
