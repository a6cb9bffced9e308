"""What the profiler says that it costs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from torch.optim import SGD

from paceline.profiler.collection import RankRecord, overhead_of
from paceline.profiler.overhead import HookCosts, NoteProbe
from paceline.profiler.tracking.event_queue import EventQueue
from paceline.records import PHASES
from tests.support.profiled import loader, model, profiled, train_step


def test_noting_is_timed_a_step_after_the_same_function_was_called() -> None:
    probe = NoteProbe()
    timed = [len(each) for each in probe._seconds]
    assert [probe.has_ended(updates) for updates in (3, 3, 4)] == [False, False, True]
    assert sum(len(each) for each in probe._seconds) == sum(timed) + 1
    # The next function is called first.
    assert not probe.has_ended(4)
    assert probe.note_seconds > 0


def test_due_events_wait_for_the_probe_but_not_for_long() -> None:
    queue = EventQueue(lambda function: function)
    queue.defer()
    queue.is_ready = lambda: False
    queue.append((1.0, lambda: None))
    queue.due = math.inf
    queue.flush_due()
    assert queue.noted == 0
    queue.due = 0.0
    queue.flush_due()
    assert queue.noted == 1


def test_the_overhead_contains_notes_losses_and_their_interpretation(tmp_path: Path) -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        for batch in loader(3):
            train_step(net, optimizer, *batch)
    tracker, costs = measured.session.tracker, HookCosts()
    notes = tracker.events.noted * costs.probe.note_seconds
    assert tracker.loss_seconds > 0
    assert tracker.events.seconds > 0
    expected = notes + tracker.loss_seconds + tracker.events.seconds + tracker.recorder_seconds
    assert costs.seconds(tracker) == pytest.approx(expected)


def test_the_fraction_is_that_of_the_time_after_start_up() -> None:
    first = {**dict.fromkeys(PHASES, 0.0), "other": 8.0, "forward": 0.1}
    block = {
        "seconds": [0.1, 0.9],
        "after_first": first,
        "phases": {**first, "forward": 1.0},
        "measuring_seconds": 0.02,
        "measuring_host_seconds": 0.03,
    }
    rank = RankRecord({"rank": 0, "workers": 1}, blocks=[block])
    overhead = overhead_of([rank], {"sampler_cpu_percent": 0.0})
    # Of one second of steps, after eight of start-up.
    assert overhead["in_loop"] == pytest.approx(0.02)
    assert overhead["host"] == pytest.approx(0.03)
