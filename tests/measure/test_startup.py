"""Startup time of a worker by part."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.measure import startup
from paceline.measure.phase_clock import CudaPhaseClock
from paceline.measure.startup import STARTUP_PARTS, StartupTimer, begin_command, importing

METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = "| `startup_seconds` |"


class FakeTime:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(startup, "perf_counter", lambda: self.now)
        monkeypatch.setattr(startup, "_import_seconds", [])
        monkeypatch.setattr(startup, "_began", [])


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return FakeTime(monkeypatch)


def test_startup_parts_are_contiguous_from_the_start_of_the_clock(time: FakeTime) -> None:
    timer = StartupTimer(started=90.0)
    timer.begin("rendezvous")
    timer.enter("data")
    time.now = 103.0
    timer.enter("model")
    time.now = 104.0
    timer.enter("rendezvous")
    time.now = 106.0
    timer.end()
    spent = {part: seconds for part, seconds in timer.seconds.items() if seconds}
    assert spent == {"rendezvous": 12.0, "data": 3.0, "model": 1.0}


def test_nothing_is_counted_before_begin_and_after_end(time: FakeTime) -> None:
    timer = StartupTimer(started=90.0)
    timer.enter("data")
    timer.end()
    assert set(timer.seconds.values()) == {0.0}
    timer.begin("model")
    timer.end()
    time.now = 200.0
    timer.enter("data")
    timer.end()
    assert (timer.seconds.pop("model"), set(timer.seconds.values())) == (10.0, {0.0})


def test_launch_is_what_precedes_the_clock_of_a_command_besides_its_imports(
    time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "process_age_seconds", lambda: 0.5)
    begin_command()
    with importing():
        time.now += 2.0
    first = StartupTimer(started=103.0)
    first.begin("rendezvous")
    assert (first.seconds["imports"], first.seconds["launch"]) == (2.0, 1.5)
    second = StartupTimer(started=500.0)
    second.begin("rendezvous")
    assert second.seconds["launch"] == 0.0


def test_imports_count_for_the_next_run_only(time: FakeTime) -> None:
    with importing():
        time.now += 2.5
    first, second = StartupTimer(time.now), StartupTimer(time.now)
    first.begin("model")
    second.begin("model")
    assert (first.seconds["imports"], second.seconds["imports"]) == (2.5, 0.0)


def test_gpu_clock_keeps_the_startup_timer_of_the_previous_clock() -> None:
    from paceline.measure.phase_clock import PhaseClock

    class NoMark:
        def query(self) -> bool:
            return True

        def synchronize(self) -> None: ...

        def elapsed_time(self, end_event: NoMark, /) -> float:
            return 0.0

    class NoGpu:
        def record(self, _: object) -> NoMark:
            return NoMark()

        def record_in_graph(self) -> NoMark:
            return NoMark()

        def record_anchor(self) -> NoMark:
            return NoMark()

        def use_current_stream(self) -> None: ...

    before = PhaseClock()
    assert CudaPhaseClock(before, NoGpu()).startup is before.startup


def test_startup_timer_does_not_import_torch() -> None:
    program = "import sys; import paceline.measure.startup; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_documented_startup_parts_are_recorded() -> None:
    (row,) = (line for line in METRICS.read_text().splitlines() if line.startswith(ROW))
    assert tuple(re.findall(r"`(\w+)`: ", row)) == STARTUP_PARTS
