"""The phase clock divides wall time into phases without gaps."""

from __future__ import annotations

import pytest

from paceline.measure import phase_clock as clock_module
from paceline.measure.phase_clock import PhaseClock


class ManualClock:
    """A clock that the test advances in whole seconds, so that sums are exact."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def manual(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    manual = ManualClock()
    monkeypatch.setattr(clock_module, "perf_counter", manual)
    return manual


def test_time_counts_for_the_last_entered_phase(manual: ManualClock) -> None:
    clock = PhaseClock()
    manual.now += 1
    clock.enter("forward")
    manual.now += 2
    clock.enter("backward")
    manual.now += 4
    clock.enter("other")
    spent = {phase: seconds for phase, seconds in clock.seconds.items() if seconds}
    assert spent == {"other": 1, "forward": 2, "backward": 4}


def test_phases_add_up_to_the_wall_time(manual: ManualClock) -> None:
    clock = PhaseClock()
    for index, phase in enumerate(("input", "forward", "wait", "forward", "update", "other")):
        manual.now += index + 1
        clock.enter(phase)
    assert sum(clock.seconds.values()) == clock.wall_seconds == 21


def test_real_phases_add_up_to_the_wall_time() -> None:
    clock = PhaseClock()
    for _ in range(1000):
        clock.enter("forward")
        clock.enter("backward")
    assert sum(clock.seconds.values()) == pytest.approx(clock.wall_seconds, rel=1e-9)


def test_during_returns_to_the_enclosing_phase(manual: ManualClock) -> None:
    clock = PhaseClock()
    clock.enter("backward")
    with clock.during("exchange"):
        manual.now += 1
        with clock.during("wait"):
            manual.now += 2
        manual.now += 4
    manual.now += 8
    clock.enter("other")
    spent = {phase: seconds for phase, seconds in clock.seconds.items() if seconds}
    assert spent == {"exchange": 5, "wait": 2, "backward": 8}


def test_during_returns_to_the_enclosing_phase_after_an_error(manual: ManualClock) -> None:
    clock = PhaseClock()
    with pytest.raises(RuntimeError), clock.during("exchange"):
        raise RuntimeError
    manual.now += 3
    clock.enter("forward")
    assert clock.seconds["other"] == 3


def test_enter_returns_the_time_of_the_change(manual: ManualClock) -> None:
    clock = PhaseClock()
    manual.now = 123.0
    assert clock.enter("input") == 123.0


def test_every_phase_change_is_counted(manual: ManualClock) -> None:
    clock = PhaseClock()
    clock.enter("input")
    with clock.during("wait"):
        pass
    assert clock.switches == 3


def test_cost_of_measuring_grows_with_the_phase_changes() -> None:
    clock = PhaseClock()
    assert clock.measuring_seconds(repeats=100) == 0
    clock.enter("input")
    assert clock.measuring_seconds(repeats=100) > 0


def test_step_spans_the_phases_between_its_ends(manual: ManualClock) -> None:
    clock = PhaseClock()
    for length in (1, 2):
        clock.begin_step("input")
        manual.now += length
        clock.enter("forward")
        manual.now += 4
        clock.end_step("other")
        manual.now += 8
    assert list(clock.step_seconds) == [5, 6]


def test_step_duration_is_returned_once(manual: ManualClock) -> None:
    clock = PhaseClock()
    taken = []
    for length in (1, 2):
        clock.begin_step("input")
        manual.now += length
        clock.end_step("other")
        taken.append(clock.take_step_seconds(1))
    assert taken == [[1], [2]]
