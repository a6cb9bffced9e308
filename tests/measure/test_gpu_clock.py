"""The CUDA phase clock measures GPU time even if the program runs ahead of the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import pytest
import torch

from paceline.measure import phase_clock as clock_module
from paceline.measure import phase_clock as gpu_clock_module
from paceline.measure.phase_clock import CudaPhaseClock, Mark, PhaseClock, clock_for


class Machine:
    """A simulated program and GPU with times, in whole seconds, that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.gpu_done = 100.0
        self.marks = 0
        self.drift = 0.0
        """How far the GPU's clock runs ahead of the program's, in seconds."""

    def __call__(self) -> float:
        return self.now

    def launch(self, seconds: float) -> None:
        """Queue GPU work; the program continues immediately."""
        self.gpu_done = max(self.gpu_done, self.now) + seconds

    def record(self, old: Mark | None) -> Mark:
        if not isinstance(old, FakeMark):
            self.marks += 1
            old = FakeMark(self)
        old.at, old.drift = max(self.gpu_done, self.now), self.drift
        return old

    def record_in_graph(self) -> Mark:
        return FakeMark(self)

    def record_anchor(self) -> Mark:
        return FakeMark(self, self.now, self.drift)

    def use_current_stream(self) -> None: ...


@dataclass
class FakeMark:
    machine: Machine
    at: float = 0.0
    drift: float = 0.0

    def query(self) -> bool:
        return self.machine.now >= self.at

    def synchronize(self) -> None:
        self.machine.now = max(self.machine.now, self.at)

    def elapsed_time(self, end_event: Self, /) -> float:
        return 1000 * (end_event.at + end_event.drift - self.at - self.drift)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(clock_module, "perf_counter", machine)
    monkeypatch.setattr(gpu_clock_module, "perf_counter", machine)
    return machine


def iterate(machine: Machine, clock: PhaseClock) -> None:
    """Take one second of program time and eleven of GPU time."""
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


def test_phase_lasts_as_long_as_its_gpu_work(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine)
    for _ in range(2):
        iterate(machine, clock)
    assert spent(clock) == {"input": 2, "forward": 6, "backward": 12, "update": 2}


def test_steps_last_as_long_as_their_gpu_work(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine)
    for _ in range(3):
        iterate(machine, clock)
    assert list(clock.step_seconds) == [11, 11, 11]


def test_times_can_be_read_during_a_step(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine)
    clock.begin_step("input")
    machine.launch(2)
    clock.enter("forward")
    assert spent(clock) == {"input": 2}
    machine.launch(3)
    clock.end_step("other")
    assert list(clock.step_seconds) == [5]


def test_phase_change_does_not_wait_for_the_gpu(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine)
    machine.launch(50)
    assert clock.enter("update") == 100


def test_arrive_waits_for_the_gpu(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine)
    clock.enter("backward")
    machine.launch(50)
    assert (clock.arrive("other"), spent(clock)) == (150, {"backward": 50})


def test_a_step_excludes_phases_in_the_time_of_the_gpu(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine)
    log = clock.start_log()
    clock.begin_step("input")
    machine.launch(2)
    clock.enter("evaluate")
    machine.launch(30)
    clock.exclude("forward")
    machine.launch(4)
    clock.next_step("other")
    assert machine.now == 100, "the program does not wait"
    assert [*clock.step_seconds] == [6]
    # In a log, a step begins after what it excludes.
    assert [(span.began, span.ended) for span in log.steps] == [(132, 136)]


def test_exposed_communication_lasts_as_long_as_on_the_gpu(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine)
    machine.launch(6)
    clock.enter("exchange")
    machine.launch(2)
    clock.end_exposed("update")
    assert machine.now == 100, "the program does not wait"
    machine.launch(1)
    clock.enter("other")
    assert [*clock.exposed.began, *clock.exposed.ended] == [106, 108]
    assert spent(clock) == {"other": 6, "exchange": 2, "update": 1}


def test_exposed_communication_is_corrected_for_the_drift_of_the_gpu_clock(
    machine: Machine,
) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine)
    machine.launch(10)
    machine.now += 10
    clock.enter("exchange")
    machine.drift = 1.5
    clock.end_exposed("other")
    exposed = clock.exposed
    assert exposed.ended[0] == pytest.approx(110)


def test_replayed_marks_are_read_before_the_next_replay_of_their_graph(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine)
    clock.enter("input")
    with clock.capture() as captured:
        clock.enter("forward")
        clock.enter("update")
    assert clock.phase == "input", "nothing ran"
    forward, update = (pending.mark for pending in captured.marks)
    for scale in (1, 10):
        clock.begin_step("input")
        clock.before_replay(captured)
        for mark, seconds in ((forward, scale), (update, 3 * scale)):
            machine.launch(seconds)
            assert isinstance(mark, FakeMark)
            mark.at = machine.gpu_done
        clock.replayed(captured)
        machine.launch(2 * scale)
        clock.end_step("other")
    assert spent(clock) == {"input": 11, "forward": 33, "update": 22}
    assert list(clock.step_seconds) == [6, 60]


def test_ready_marks_are_read_without_waiting(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine)
    clock.enter("forward")
    machine.launch(3)
    clock.enter("backward")
    machine.launch(5)
    clock.enter("update")
    machine.now = 104
    clock.settle_ready()
    assert machine.now == 104
    assert clock.known_seconds["forward"] == 3
    assert clock.known_seconds["backward"] == 0
    assert spent(clock) == {"forward": 3, "backward": 5}


def test_idle_gpu_time_counts_for_the_phase_of_the_program(
    machine: Machine,
) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine)
    clock.enter("checkpoint")
    machine.now += 7
    clock.enter("other")
    assert spent(clock) == {"checkpoint": 7}


def test_phases_include_the_previous_clock(machine: Machine) -> None:
    before = PhaseClock()
    machine.now += 5
    clock = CudaPhaseClock(before, machine)
    iterate(machine, clock)
    clock.arrive("other")
    assert sum(clock.seconds.values()) == clock.wall_seconds == 16


def test_marks_are_reused(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine)
    for _ in range(100):
        iterate(machine, clock)
        clock.take_step_seconds(1)
    assert machine.marks <= 6


def test_pending_marks_are_bounded(machine: Machine) -> None:
    clock = CudaPhaseClock(PhaseClock(), machine)
    for _ in range(3 * gpu_clock_module.MAX_PENDING_MARKS):
        clock.enter("other")
    assert machine.marks <= gpu_clock_module.MAX_PENDING_MARKS + 1


def test_cpu_keeps_its_clock() -> None:
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
