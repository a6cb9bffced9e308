"""The journal writes iterations in blocks, and knows what that costs."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import pytest
import torch
from torch import Tensor

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.config import RunConfig
from paceline.records import EventWriter, read_iteration_seconds
from paceline.strategies.options import create_strategy
from paceline.training import run_logger as journal_module
from paceline.training.coordination import StepCoordinator
from paceline.training.display import open_display
from paceline.training.run_logger import RunLogger
from tests.support import toy_replicas as toy


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return tmp_path / "events-0.jsonl"


@pytest.fixture
def journal(events: Path) -> RunLogger:
    return RunLogger(EventWriter(events), None, open_display(quiet=True), 10)


def note(journal: RunLogger, index: int) -> None:
    journal.iteration(index, torch.tensor(2.0), 4, rate=0.1, now=0.0)


def test_each_iteration_is_written_with_its_own_time(journal: RunLogger, events: Path) -> None:
    laps = [[0.25, 0.5], [1.0]]
    journal.take_iteration_seconds = lambda: laps.pop(0)
    note(journal, 0)
    note(journal, 1)
    journal.flush()
    note(journal, 2)
    journal.flush()
    journal.close()
    assert read_iteration_seconds(events, until=3) == [0.25, 0.5, 1.0]


class Noted:
    """Collects scalars instead of writing them."""

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[int, float]]] = {}

    def add(self, tag: str, value: float, step: int) -> None:
        self.values.setdefault(tag, []).append((step, value))

    def close(self) -> None: ...


def test_scalars_have_step_time_and_phase_shares_of_each_block(events: Path) -> None:
    noted = Noted()
    journal = RunLogger(EventWriter(events), noted, open_display(quiet=True), 10)  # type: ignore[arg-type]
    laps = [[0.25, 0.75], [2.0]]
    phases = [
        {"forward": 0.0, "wait": 0.0, "other": 40.0},
        {"forward": 0.75, "wait": 0.0, "other": 40.25},
        {"forward": 1.75, "wait": 1.0, "other": 40.25},
    ]
    journal.take_iteration_seconds = lambda: laps.pop(0)
    journal.settled_phase_seconds = lambda: phases.pop(0)
    journal.begin()
    note(journal, 0)
    note(journal, 1)
    journal.flush()
    note(journal, 2)
    journal.flush()
    journal.close()
    assert noted.values["train/step_seconds"] == [(2, 0.5), (3, 2.0)]
    assert noted.values["train/samples_per_second"] == [(2, 8.0), (3, 2.0)]
    assert noted.values["phases/forward"] == [(2, 0.75), (3, 0.5)]
    assert noted.values["phases/other"] == [(2, 0.25), (3, 0.0)]
    assert noted.values["phases/wait"] == [(3, 0.5)]


def test_phase_shares_stay_within_0_and_1_when_waits_are_settled_late(events: Path) -> None:
    """Two blocks for each settlement, which moves most of the exchanges of both to waits."""

    def work(communicator: Communicator) -> list[tuple[str, float]]:
        replica = toy.replica(communicator, toy.sgd())
        clock = replica.clock
        team = StepCoordinator(RunConfig(), create_strategy("allreduce", {}), replica)
        noted = Noted()
        writer = EventWriter(events.with_name(f"events-{communicator.rank}.jsonl"))
        journal = RunLogger(writer, noted, open_display(quiet=True), 10)  # type: ignore[arg-type]
        journal.take_iteration_seconds = lambda: [1.0]
        journal.phase_seconds = lambda: clock.seconds
        journal.settled_phase_seconds = lambda: team.settled_phase_seconds
        team.begin()
        journal.begin()
        for index in range(8):
            clock._seconds["exchange"] += 1.0
            clock._seconds["forward"] += 0.1
            began = perf_counter() + (0.9 if communicator.rank else 0.0)
            replica.exposed.note(began, began + 1.0)
            note(journal, index)
            journal.flush()
            if index % 2:
                team.settle()
        note(journal, 8)
        journal.flush()
        journal.close()
        return [(tag, value) for tag, points in noted.values.items() for _, value in points]

    for scalars in in_process.run(2, work):
        shares = [value for tag, value in scalars if tag.startswith("phases/")]
        assert len(shares) > 4
        assert all(0 <= share <= 1 for share in shares)


def test_waiting_for_the_gpu_to_give_the_losses_is_no_cost_of_measuring(
    journal: RunLogger, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    stack = torch.stack

    def slow_stack(losses: list[Tensor]) -> Tensor:
        nonlocal now
        now += 5
        return stack(losses)

    monkeypatch.setattr(journal_module, "perf_counter", lambda: now)
    monkeypatch.setattr(torch, "stack", slow_stack)
    journal.take_iteration_seconds = lambda: [1.0]
    note(journal, 0)
    journal.flush()
    journal.close()
    assert (now, journal.seconds_spent) == (105, 0)
