"""The run logger writes iterations in blocks and measures its overhead."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter, sleep
from typing import cast

import pytest
import torch
from torch import Tensor

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.config import RunConfig
from paceline.measure.gradient_noise import GradientNoise
from paceline.measure.phase_clock import PhaseClock
from paceline.measure.tensorboard import TensorBoardWriter
from paceline.records import EventWriter, read_iteration_seconds
from paceline.strategies import create_strategy
from paceline.strategies.strategy import Strategy
from paceline.training import run_logger
from paceline.training.coordination import StepCoordinator
from paceline.training.display import open_display
from paceline.training.run_logger import RunLogger
from tests.support import toy_replicas as toy


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return tmp_path / "events-0.jsonl"


class ScriptedTimes:
    """Stands for the clock and the coordinator: gives the next of the listed times at each call."""

    def __init__(
        self, step_seconds: list[list[float]], settled_phases: list[dict[str, float]] | None = None
    ) -> None:
        self.known_seconds: dict[str, float] = {}
        self.noise = GradientNoise()
        self._step_seconds = step_seconds
        self._settled_phases = settled_phases or []

    def settle_ready(self) -> None: ...

    def take_step_seconds(self, steps: int) -> list[float]:
        seconds = self._step_seconds.pop(0)
        assert len(seconds) == steps
        return seconds

    @property
    def settled_phase_seconds(self) -> dict[str, float]:
        return self._settled_phases.pop(0) if self._settled_phases else {}


def make_logger(
    events: Path, times: ScriptedTimes, tensorboard: ScalarRecorder | None = None
) -> RunLogger:
    return RunLogger(
        EventWriter(events),
        cast("TensorBoardWriter | None", tensorboard),
        open_display(quiet=True),
        10,
        cast("PhaseClock", times),
        cast("StepCoordinator", times),
        Strategy(),
    )


def add(logger: RunLogger, index: int) -> None:
    logger.iteration(index, torch.tensor(2.0), 4, rate=0.1, now=0.0)


def test_each_iteration_is_written_with_its_own_time(events: Path) -> None:
    logger = make_logger(events, ScriptedTimes([[0.25, 0.5], [1.0]]))
    add(logger, 0)
    add(logger, 1)
    logger.flush()
    add(logger, 2)
    logger.flush()
    logger.close()
    assert read_iteration_seconds(events, until=3) == [0.25, 0.5, 1.0]


class ScalarRecorder:
    """Collects scalars instead of writing them."""

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[int, float]]] = {}

    def add(self, tag: str, value: float, step: int) -> None:
        self.values.setdefault(tag, []).append((step, value))

    def close(self) -> None: ...


def test_scalars_have_step_time_and_phase_fractions_of_each_block(events: Path) -> None:
    recorder = ScalarRecorder()
    phases = [
        {"forward": 0.0, "wait": 0.0, "other": 40.0},
        {"forward": 0.75, "wait": 0.0, "other": 40.25},
        {"forward": 1.75, "wait": 1.0, "other": 40.25},
    ]
    logger = make_logger(events, ScriptedTimes([[0.25, 0.75], [2.0]], phases), recorder)
    logger.begin()
    add(logger, 0)
    add(logger, 1)
    logger.flush()
    add(logger, 2)
    logger.flush()
    logger.close()
    assert recorder.values["train/step_seconds"] == [(2, 0.5), (3, 2.0)]
    assert recorder.values["train/samples_per_second"] == [(2, 8.0), (3, 2.0)]
    assert recorder.values["phases/forward"] == [(2, 0.75), (3, 0.5)]
    assert recorder.values["phases/other"] == [(2, 0.25), (3, 0.0)]
    assert recorder.values["phases/wait"] == [(3, 0.5)]


def test_phase_fractions_stay_within_0_and_1_when_waits_are_attributed_late(events: Path) -> None:
    """Waits are attributed after every second block, and most of the exchange time was waiting."""

    def work(communicator: Communicator) -> list[tuple[str, float]]:
        replica = toy.replica(communicator, toy.sgd())
        clock = replica.clock
        strategy = create_strategy("allreduce", {})
        coordinator = StepCoordinator(RunConfig(), strategy, replica)
        recorder = ScalarRecorder()
        logger = RunLogger(
            EventWriter(events.with_name(f"events-{communicator.rank}.jsonl")),
            cast("TensorBoardWriter", recorder),
            open_display(quiet=True),
            10,
            clock,
            coordinator,
            strategy,
        )
        coordinator.start()
        logger.begin()
        for index in range(8):
            clock._seconds["exchange"] += 1.0
            clock._seconds["forward"] += 0.1
            began = perf_counter() + (0.9 if communicator.rank else 0.0)
            replica.exposed.add(began, began + 1.0)
            clock.end_step("other")
            add(logger, index)
            logger.flush()
            if index % 2:
                coordinator.settle()
        add(logger, 8)
        logger.flush()
        logger.close()
        return [(tag, value) for tag, points in recorder.values.items() for _, value in points]

    for scalars in in_process.run(2, work):
        shares = [value for tag, value in scalars if tag.startswith("phases/")]
        assert len(shares) > 4
        assert all(0 <= share <= 1 for share in shares)


def test_the_first_phases_do_not_include_startup() -> None:
    startup_seconds = 0.05

    def work(communicator: Communicator) -> float:
        replica = toy.replica(communicator, toy.sgd())
        coordinator = StepCoordinator(RunConfig(), create_strategy("allreduce", {}), replica)
        sleep(startup_seconds)
        coordinator.start()
        return coordinator.settled_phase_seconds["other"]

    for settled_seconds in in_process.run(2, work):
        assert settled_seconds >= startup_seconds


def test_waiting_for_the_losses_of_a_gpu_is_not_measurement_overhead(
    events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    stack = torch.stack

    def slow_stack(losses: list[Tensor]) -> Tensor:
        nonlocal now
        now += 5
        return stack(losses)

    logger = make_logger(events, ScriptedTimes([[1.0]]))
    monkeypatch.setattr(run_logger, "perf_counter", lambda: now)
    monkeypatch.setattr(torch, "stack", slow_stack)
    add(logger, 0)
    logger.flush()
    logger.close()
    assert (now, logger.seconds_spent) == (105, 0)
