"""Phases of the iterations after the first, without startup, evaluation and checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.measure import phase_clock as clock_module
from paceline.measure.phase_clock import PhaseClock
from paceline.measure.traffic import Traffic
from paceline.records import TRAFFIC_KINDS
from paceline.strategies.replica import Replica
from paceline.training.steady import SteadyPhases


class Bench:
    """A clock that the test moves by whole seconds, and the phases counted by it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.traffic = Traffic()
        self.replica = SimpleNamespace(
            hidden_exchange_seconds=0.0, communicator=SimpleNamespace(traffic=self.traffic)
        )

    def start(self) -> None:
        """As in a new process."""
        self.clock = PhaseClock()
        self.steady = SteadyPhases(self.clock, cast("Replica", self.replica))

    def spend(self, phase: str, seconds: float) -> None:
        self.clock.enter(phase)
        self.now += seconds
        self.clock.enter("other")

    def iteration(self, forward: float, exchange: float) -> None:
        self.spend("forward", forward)
        self.spend("exchange", exchange)
        self.replica.hidden_exchange_seconds += 1.0
        self.traffic.counts["gradients"].bytes_sent += 10

    def spent(self) -> dict[str, float]:
        figures = self.steady.to_dict()
        assert figures is not None
        return {phase: seconds for phase, seconds in figures["phases"].items() if seconds}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench()
    monkeypatch.setattr(clock_module, "perf_counter", lambda: bench.now)
    bench.start()
    return bench


def test_only_steps_after_the_first_count(bench: Bench) -> None:
    bench.spend("exchange", 64)
    bench.iteration(forward=32, exchange=16)
    bench.clock.move("exchange", "wait", 8)
    bench.steady.first_done()
    for _ in range(3):
        bench.iteration(forward=2, exchange=1)
        bench.steady.first_done()
        with bench.steady.outside():
            bench.spend("exchange", 128)
    bench.clock.move("exchange", "wait", 2)
    bench.steady.end()
    bench.spend("exchange", 256)
    assert bench.spent() == {"forward": 6, "exchange": 1, "wait": 2}
    assert bench.steady.to_dict() == {
        "phases": {"input": 0, "forward": 6, "backward": 0, "exchange": 1, "wait": 2, "update": 0},
        "hidden_exchange_seconds": 3.0,
        "bytes_sent": {kind: 30 if kind == "gradients" else 0 for kind in TRAFFIC_KINDS},
    }


def test_block_after_the_end_changes_nothing(bench: Bench) -> None:
    bench.iteration(forward=32, exchange=16)
    bench.steady.first_done()
    bench.iteration(forward=2, exchange=1)
    bench.steady.end()
    with bench.steady.outside():
        bench.spend("exchange", 64)
    assert bench.spent() == {"forward": 2, "exchange": 1}


def test_block_after_the_end_is_excluded_once(bench: Bench) -> None:
    bench.iteration(forward=32, exchange=16)
    bench.steady.first_done()
    bench.steady.end()
    with bench.steady.outside():
        bench.spend("exchange", 64)
    bench.steady.leave_out()
    bench.iteration(forward=2, exchange=1)
    assert bench.spent() == {"forward": 2, "exchange": 1}


def test_time_since_the_end_can_be_excluded(bench: Bench) -> None:
    bench.iteration(forward=32, exchange=16)
    bench.steady.first_done()
    bench.steady.end()
    bench.spend("wait", 64)
    bench.steady.leave_out()
    bench.iteration(forward=2, exchange=1)
    assert bench.spent() == {"forward": 2, "exchange": 1}


def test_the_first_iteration_after_a_resume_counts(bench: Bench) -> None:
    bench.iteration(forward=32, exchange=16)
    bench.steady.first_done()
    bench.iteration(forward=2, exchange=1)
    saved = bench.steady.to_dict()
    bench.start()
    bench.spend("exchange", 64)
    bench.steady.resume(saved)
    bench.iteration(forward=4, exchange=2)
    bench.steady.first_done()
    bench.steady.end()
    assert bench.spent() == {"forward": 6, "exchange": 3}
    assert (bench.steady.to_dict() or {})["hidden_exchange_seconds"] == 2.0


def test_values_missing_in_the_checkpoint_stay_unknown(bench: Bench) -> None:
    bench.steady.resume(None)
    bench.iteration(forward=4, exchange=2)
    assert bench.steady.to_dict() is None


def test_overlapped_communication_that_is_not_measured_stays_unknown(bench: Bench) -> None:
    unmeasured: dict[str, Any] = {"hidden_exchange_seconds": None}
    bench.replica.__dict__.update(unmeasured)
    bench.steady.first_done()
    bench.spend("forward", 2)
    assert (bench.steady.to_dict() or {"hidden_exchange_seconds": 0})[
        "hidden_exchange_seconds"
    ] is None
    assert bench.spent() == {"forward": 2}


def test_single_step_counts_nothing(bench: Bench) -> None:
    bench.iteration(forward=32, exchange=16)
    bench.steady.end()
    assert bench.spent() == {}
