"""The clock of a GPU times the GPU's work, however far the program runs ahead of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import pytest
import torch

from paceline.measure import phase_clock as clock_module
from paceline.measure import phase_clock as gpu_clock_module
from paceline.measure.phase_clock import CudaPhaseClock, Mark, PhaseClock, clock_for


class Machine:
    """A program and the GPU that it gives work to, on times that the test sets: whole seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.gpu_done = 100.0
        self.marks = 0

    def __call__(self) -> float:
        return self.now

    def launch(self, seconds: float) -> None:
        """Give the GPU work that it does after what it has; the program goes on at once."""
        self.gpu_done = max(self.gpu_done, self.now) + seconds

    def put_mark(self, old: Mark | None) -> Mark:
        if not isinstance(old, FakeMark):
            self.marks += 1
            old = FakeMark(self)
        old.at = max(self.gpu_done, self.now)
        return old


@dataclass
class FakeMark:
    machine: Machine
    at: float = 0.0

    def synchronize(self) -> None:
        self.machine.now = max(self.machine.now, self.at)

    def elapsed_time(self, end_event: Self, /) -> float:
        return 1000 * (end_event.at - self.at)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(clock_module, "perf_counter", machine)
    monkeypatch.setattr(gpu_clock_module, "perf_counter", machine)
    return machine


def iterate(machine: Machine, clock: PhaseClock) -> None:
    """One second of the program's, eleven of the GPU's."""
    clock.begin_step("input")
    machine.launch(1)
    clock.enter("forward")
    machine.launch(3)
    clock.enter("backward")
    machine.launch(6)
    clock.enter("update")
    machine.launch(1)
    machine.now += 1
    clock.end_step("other")


def spent(clock: PhaseClock) -> dict[str, float]:
    return {phase: seconds for phase, seconds in clock.seconds.items() if seconds}


def test_a_phase_lasts_as_long_as_the_gpu_takes_for_its_work(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine.put_mark)
    for _ in range(2):
        iterate(machine, clock)
    assert spent(clock) == {"input": 2, "forward": 6, "backward": 12, "update": 2}


def test_laps_last_as_long_as_the_gpu_takes_for_them(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine.put_mark)
    for _ in range(3):
        iterate(machine, clock)
    assert list(clock.lap_seconds) == [11, 11, 11]


def test_a_lap_may_be_under_way_when_times_are_asked_for(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine.put_mark)
    clock.begin_step("input")
    machine.launch(2)
    clock.enter("forward")
    assert spent(clock) == {"input": 2}
    machine.launch(3)
    clock.end_step("other")
    assert list(clock.lap_seconds) == [5]


def test_the_program_does_not_wait_at_a_change_of_phase(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine.put_mark)
    machine.launch(50)
    assert clock.enter("update") == 100


@pytest.mark.parametrize("enter", ["exchange", "arrive"])
def test_an_exchange_and_an_arrival_are_entered_with_the_gpu(machine: Machine, enter: str) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine.put_mark)
    clock.enter("backward")
    machine.launch(50)
    moment = clock.enter("exchange") if enter == "exchange" else clock.arrive("other")
    assert (moment, spent(clock)) == (150, {"backward": 50})


def test_time_in_which_the_gpu_has_nothing_to_do_belongs_to_the_program_s_phase(
    machine: Machine,
) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine.put_mark)
    clock.enter("checkpoint")
    machine.now += 7
    clock.enter("other")
    assert spent(clock) == {"checkpoint": 7}


def test_phases_add_up_to_the_wall_time_with_what_came_before(machine: Machine) -> None:
    before = PhaseClock()
    machine.now += 5
    clock = CudaPhaseClock(before, machine.put_mark)
    iterate(machine, clock)
    clock.arrive("other")
    assert sum(clock.seconds.values()) == clock.wall_seconds == 16


def test_marks_are_used_again(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine.put_mark)
    for _ in range(100):
        iterate(machine, clock)
        clock.take_laps()
    assert machine.marks <= 6


def test_marks_that_nobody_asks_for_do_not_pile_up(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine.put_mark)
    for _ in range(3 * gpu_clock_module.MARKS_AT_MOST):
        clock.enter("other")
    assert machine.marks <= gpu_clock_module.MARKS_AT_MOST + 1


def test_a_cpu_keeps_the_clock_it_has() -> None:
    clock = PhaseClock()
    assert clock_for(torch.device("cpu"), clock) is clock


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_phases_add_up_to_the_wall_time_on_a_real_gpu() -> None:
    clock = clock_for(torch.device("cuda"), PhaseClock())
    matrix = torch.zeros(4096, 4096, device="cuda")
    for phase in ("forward", "backward", "update"):
        clock.enter(phase)
        for _ in range(50):
            matrix = matrix @ matrix
    clock.arrive("other")
    assert sum(clock.seconds.values()) == pytest.approx(clock.wall_seconds, rel=0.01)
