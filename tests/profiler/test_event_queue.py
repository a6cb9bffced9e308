"""Events are interpreted later, as if they were interpreted at once."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from paceline.profiler import rank_log
from paceline.profiler.tracking import event_queue, notes
from paceline.profiler.tracking.event_queue import EventQueue
from paceline.records import RunFolder
from tests.support.profiled import loader, loss_of, model, profiled, train_step


def batch_of(samples: int) -> tuple[Tensor, Tensor]:
    return torch.ones(samples, 2), torch.zeros(samples, 2)


def test_an_event_that_waits_keeps_its_time() -> None:
    queue = EventQueue(lambda function: function)
    times: list[float] = []
    queue.append((1.0, lambda: times.append(queue.time())))
    queue.defer()
    queue.append((2.0, lambda: times.append(queue.time())))
    assert times == [1.0]
    queue.flush()
    assert times == [1.0, 2.0]
    assert queue.noted == 2
    assert queue.time() > 2.0


def test_events_wait_after_the_first_step_until_the_clock_is_read(tmp_path: Path) -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        tracker = measured.session.tracker
        batches = iter(loader(3))
        train_step(net, optimizer, *next(batches))
        assert tracker.steps == 1
        tracker.events.due, tracker.events.due_update = math.inf, sys.maxsize
        train_step(net, optimizer, *next(batches))
        assert tracker.steps == 1
        assert tracker.clock.phase == "other"
        assert tracker.steps == 2
        # A read-back is counted by the phase that the script is in.
        loss_of(net, *next(batches)).item()
    (call,) = [event for event in measured.record.events if event["event"] == "facts"][-1]["calls"]
    assert call["call"] == "Tensor.item"
    assert measured.phases[-2:] == ["input", "forward"]


def test_waiting_events_keep_no_object_of_the_script(tmp_path: Path) -> None:
    with profiled(tmp_path) as measured:
        tracker = measured.session.tracker
        train_step(net := model(), optimizer := SGD(net.parameters(), lr=0.1), *batch_of(4))
        tracker.events.due, tracker.events.due_update = math.inf, sys.maxsize
        loaded = loader(1)
        for batch in loaded:
            loss = loss_of(net, *batch)
            loss.backward()
            optimizer.step()
        kept: list[Any] = [net, optimizer, loaded, loss, *batch, *net.parameters()]
        kept = [ref(each) for each in kept]
        del net, optimizer, loaded, loss, batch
        assert [each() for each in kept] == [None] * 10
        # What they say is still known.
        assert tracker.steps == 1
        tracker.events.flush()
        assert tracker.steps == 2


def test_ranks_with_steps_of_similar_length_interpret_events_after_the_same_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    due = []
    for step_seconds in (0.0115, 0.0150):
        now = 0.0
        monkeypatch.setattr(event_queue, "perf_counter", lambda: now)  # noqa: B023
        queue = EventQueue(lambda function: function)
        interpreted: list[int] = []
        queue.defer()
        while queue.updates < 200:
            queue.updates += 1
            now += step_seconds
            queue.append((now, lambda: None))
            if queue.updates >= queue.due_update:
                interpreted.append(queue.updates)
                queue.flush_due()
        due.append(interpreted)
    assert due[0] == due[1]
    assert due[0][-5:] == [64, 96, 128, 160, 192]


def test_events_wait_longer_in_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(event_queue, "perf_counter", lambda: now)
    queue = EventQueue(lambda function: function)
    queue.defer()
    due = []
    while now < 60:
        queue.updates += 1
        now += 1 / 128
        queue.append((now, lambda: None))
        if queue.updates >= queue.due_update:
            due.append(now)
            queue.flush_due()
    intervals = [after - before for before, after in pairwise(due)]
    assert intervals[4] == 0.5
    assert intervals[-1] == 1.0


def test_events_are_due_if_no_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1.0
    monkeypatch.setattr(event_queue, "perf_counter", lambda: now)
    queue = EventQueue(lambda function: function)
    assert queue.due == math.inf
    queue.defer()
    assert now < queue.due < now + 2.0


def test_events_of_a_burst_of_updates_do_not_wait_for_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several optimizers step at once, so the estimate of how often they do is too high."""
    now = 1.0
    monkeypatch.setattr(event_queue, "perf_counter", lambda: now)
    monkeypatch.setattr(notes, "perf_counter", lambda: now)
    weights = [torch.ones(2, requires_grad=True) for _ in range(8)]
    optimizers = [SGD([weight], lr=0.1) for weight in weights]
    with profiled(tmp_path) as measured:
        tracker = measured.session.tracker
        for step in range(8):
            now += 1.5
            # Neither a DataLoader nor a module.
            sum((weight.sum() for weight in weights), torch.zeros(())).backward()
            for optimizer in optimizers:
                now += 1e-5
                optimizer.step()
            assert tracker.steps >= step - 1


def test_a_block_is_written_when_all_steps_that_were_noted_are_interpreted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU time is read then: the number of steps must be that of the same moment."""
    monkeypatch.setattr(rank_log, "BLOCK_SHARE", 0.0)
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        tracker = measured.session.tracker
        for batch in loader(6):
            train_step(net, optimizer, *batch)
            tracker.events.due, tracker.events.due_update = math.inf, sys.maxsize
        tracker.events.flush()
        lines = RunFolder(tmp_path).events_file(0).read_text().splitlines()
        events = [json.loads(line) for line in lines]
    assert [event["steps"] for event in events if event["event"] == "facts"] == [6]
    (block,) = (event for event in events if event["event"] == "iterations")
    assert len(block["seconds"]) == 6


def in_another_thread(function: Callable[[], object]) -> None:
    thread = Thread(target=function)
    thread.start()
    thread.join()


def test_only_the_training_thread_interprets_events(tmp_path: Path) -> None:
    """Another one may save a checkpoint, or train another model, meanwhile."""
    net, other = model(), model()
    optimizer, other_optimizer = SGD(net.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        events, batch = measured.session.tracker.events, batch_of(4)
        train_step(net, optimizer, *batch)
        interpreted = events.noted
        train_step(net, optimizer, *batch)
        events.noted, events.due, events.due_update = interpreted, -math.inf, 0
        in_another_thread(lambda: torch.save(net.state_dict(), io.BytesIO()))
        in_another_thread(lambda: train_step(other, other_optimizer, *batch))
        assert events.noted == interpreted
        train_step(net, optimizer, *batch)
    assert len(measured.record.step_seconds) == 3


def test_steps_that_another_thread_takes_meanwhile_are_not_counted(tmp_path: Path) -> None:
    net, other = model(), model()
    optimizer, other_optimizer = SGD(net.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)

    def train_other(*args: object) -> None:
        for _ in range(2):
            in_another_thread(lambda: train_step(other, other_optimizer, *batch_of(4)))

    with profiled(tmp_path) as measured:
        train_step(net, optimizer, *batch_of(4))
        # While the optimizer steps.
        optimizer.register_step_pre_hook(train_other)
        for _ in range(2):
            train_step(net, optimizer, *batch_of(4))
    assert len(measured.record.step_seconds) == 3


def test_the_thread_that_closes_the_session_interprets_what_is_left(tmp_path: Path) -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(4):
            train_step(net, optimizer, *batch_of(4))

    with profiled(tmp_path) as measured:
        in_another_thread(train)
    assert len(measured.record.step_seconds) == 4


def test_no_event_waits_after_the_session(tmp_path: Path) -> None:
    """Hooks of optimizers stay until the session is closed, since torch may be calling them."""
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        train_step(net, optimizer, *batch_of(4))
        measured.session.fail(ValueError("no such phase"))
        events = measured.session.tracker.events
        noted = events.updates
        train_step(net, optimizer, *batch_of(4))
        assert events.updates == noted + 1
        assert not events._waiting


def test_an_error_while_events_are_interpreted_is_not_one_of_the_script(tmp_path: Path) -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        tracker = measured.session.tracker
        train_step(net, optimizer, *next(iter(loader(1))))
        tracker.events.append((0.0, lambda: 1 // 0))
        tracker.events.due = 0.0
        for batch in loader(3):
            train_step(net, optimizer, *batch)
    (warning,) = (tmp_path / "profiler-warnings.jsonl").read_text().splitlines()
    assert "the profiler stopped" in warning
