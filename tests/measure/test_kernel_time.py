"""Kernel time of traced iterations: the union of the kernels that a profiler records."""

from __future__ import annotations

import pytest
import torch

from paceline.measure import phase_clock as clock_module
from paceline.measure.kernel_time import Interval, KernelTimer, covered, kernel_timer_for
from paceline.measure.phase_clock import PhaseClock
from paceline.measure.trace import WARM_UP_ITERATIONS, Tracer
from paceline.measure.traffic import Traffic


class FakeProfiler:
    def __init__(self, kernels: list[Interval]) -> None:
        self._kernels = kernels
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def kernels(self) -> list[Interval]:
        return self._kernels


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(1, 3), (5, 6)], 3),
        ([(5, 6), (1, 3)], 3),
        ([(10, 40), (20, 30), (35, 60)], 50),
        ([(1, 2), (2, 3)], 2),
    ],
)
def test_kernels_that_overlap_count_once(intervals: list[Interval], length: int) -> None:
    assert covered(intervals) == length


def test_window_starts_once_and_ends_once() -> None:
    profiler = FakeProfiler([(0, 2 * 10**9)])
    timer = KernelTimer(profiler)
    timer.stop()
    assert (timer.seconds(), profiler.calls) == (None, [])
    timer.start()
    assert timer.seconds() is None
    timer.stop()
    timer.stop()
    assert (timer.seconds(), profiler.calls) == (2.0, ["start", "stop"])


def test_kernel_time_is_unknown_if_no_kernel_could_be_recorded() -> None:
    timer = KernelTimer(FakeProfiler([]))
    timer.start()
    timer.stop()
    assert timer.seconds() is None


def test_traced_iterations_are_profiled_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(clock_module, "perf_counter", lambda: now[0])
    profiler, clock = FakeProfiler([(0, 15 * 10**8)]), PhaseClock()
    kernels = KernelTimer(profiler)
    tracer = Tracer(clock, Traffic(), iterations=2, done=0, left=100, kernels=kernels)
    calls = []
    for number in range(WARM_UP_ITERATIONS + 4):
        tracer.before_iteration(number)
        calls.append(list(profiler.calls))
        clock.begin_step("input")
        now[0] += 1.0
        clock.end_step("other")
        now[0] += 0.25
    before, after = calls[:WARM_UP_ITERATIONS], calls[WARM_UP_ITERATIONS + 2 :]
    assert all(each == [] for each in before)
    assert calls[WARM_UP_ITERATIONS] == calls[WARM_UP_ITERATIONS + 1] == ["start"]
    assert all(each == ["start", "stop"] for each in after)
    # Two steps of a second, with a quarter of a second between them.
    assert tracer.kernel_time() == {"iterations": 2, "seconds": 1.5, "window_seconds": 2.25}


def test_trace_on_a_cpu_has_no_kernel_time() -> None:
    assert kernel_timer_for(torch.device("cpu")) is None
    tracer = Tracer(PhaseClock(), Traffic(), iterations=1, done=0, left=1)
    tracer.before_iteration(0)
    assert tracer.kernel_time() is None


@pytest.mark.gpu
def test_gpu_kernels_cover_most_of_a_busy_window_and_little_of_an_idle_one() -> None:
    matrix = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    timer = kernel_timer_for(torch.device("cuda"))
    assert timer is not None
    timer.start()
    begin.record()
    for _ in range(50):
        matrix = matrix @ matrix
    end.record()
    torch.cuda.synchronize()
    timer.stop()
    seconds = timer.seconds()
    assert seconds is not None
    assert 0.5 * begin.elapsed_time(end) / 1000 < seconds <= 1.01 * begin.elapsed_time(end) / 1000
