"""Steps in which hooks time only input and backward passes notice what else a script does."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from paceline.measure.phase_clock import PhaseClock
from paceline.profiler import FACTOR_VARIABLE
from paceline.profiler.collection import read_ranks
from paceline.profiler.session import Session
from paceline.profiler.tracking.paused_steps import Measured, Noted, StepPhases, UsualStep
from paceline.records import PHASES, RunFolder
from tests.support.profiled import loader, loss_of, model, train_step

STEPS = 160


class Script:
    """Trains in a session that records about one of eight windows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.net = model()
        self.optimizer = SGD(self.net.parameters(), lr=0.1)
        self.batches = loader(STEPS)
        self.session = Session(folder)

    @property
    def is_paused(self) -> bool:
        return bool(self.session.tracker.paused.thread)

    def train(self, batches: Any) -> None:
        for batch in batches:
            train_step(self.net, self.optimizer, *batch)

    def train_until_paused(self) -> int:
        """Returns the number of steps."""
        for steps, batch in enumerate(self.batches):
            train_step(self.net, self.optimizer, *batch)
            if self.is_paused:
                return steps + 1
        raise AssertionError("no pause")

    def close(self) -> Mapping[str, Any]:
        """The totals at the end."""
        self.session.close()
        (record,) = read_ranks(RunFolder(self.folder))
        return record.blocks[-1]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setenv(FACTOR_VARIABLE, "8")
    one = Script(tmp_path)
    one.session.start()
    yield one
    one.session.close()


def test_steps_and_samples_are_exact_and_phases_add_up(script: Script) -> None:
    for _ in range(3):
        script.train(loader(STEPS + 1))
    tracker, clock = script.session.tracker, script.session.tracker.clock
    totals = script.close()
    assert tracker.paused_steps > STEPS
    assert tracker.steps == 3 * (STEPS + 1)
    assert totals["samples"] == 3 * 4 * (STEPS + 1)
    assert math.fsum(totals["phases"].values()) == pytest.approx(clock.wall_seconds, abs=1e-4)
    assert min(totals["phases"].values()) >= 0
    for phase in ("input", "forward", "backward", "update"):
        assert totals["phases"][phase] > 0
    assert len(clock.step_seconds) == tracker.steps
    batches = [each["batches"] for each in script.session._calls.records()["loaders"]]
    assert batches == [STEPS + 1] * 3


def test_batches_in_a_pause_count_for_their_loader(script: Script) -> None:
    script.batches = loader(STEPS)  # the session knows loaders that were created in it
    steps = script.train_until_paused()
    data = script.batches.dataset
    slow = DataLoader(data, batch_size=4, collate_fn=slowly)
    script.train(islice(slow, 3))
    # Two in turns.
    first, second = iter(DataLoader(data, batch_size=4)), iter(DataLoader(data, batch_size=4))
    for batches in (first, first, second, first, second):
        script.train(islice(batches, 1))
    assert script.is_paused
    script.close()
    loaders = script.session._calls.records()["loaders"]
    assert [each["batches"] for each in loaders] == [steps, 3, 3, 2]
    assert loaders[1]["seconds"] >= 3 * SLOW_SECONDS
    assert loaders[2]["seconds"] + loaders[3]["seconds"] < SLOW_SECONDS


SLOW_SECONDS = 0.1


def slowly(samples: Any) -> Any:
    time.sleep(SLOW_SECONDS)
    return default_collate(samples)


class SlowData(Dataset[Any]):
    """Each tenth sample takes 20 ms."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index % 10 == 9:
            time.sleep(0.02)
        return torch.ones(2), torch.zeros(2)


def test_input_is_measured_in_each_step(script: Script) -> None:
    script.train_until_paused()
    before = script.session.tracker.clock.seconds["input"]
    # Another dataset would end the pause.
    data = SlowData()
    script.session.tracker.paused.dataset_id = id(data)
    script.train(DataLoader(data, batch_size=4))
    assert script.is_paused
    script.session.tracker.events.flush()
    script.session._flushed()
    assert script.session.tracker.clock.seconds["input"] - before >= 0.08
    assert script.session.tracker.clock.seconds["wait"] == 0


def evaluate_without_loader(net: nn.Module) -> None:
    net.eval()
    with torch.no_grad():
        net(torch.ones(1, 2))
        time.sleep(0.03)
    net.train()


def evaluate_with_loader(net: nn.Module) -> None:
    net.eval()
    for inputs, _ in loader(3):
        time.sleep(0.01)
        with torch.no_grad():
            net(inputs)
    net.train()


def evaluate_batches_without_gradients(net: nn.Module) -> None:
    with torch.no_grad():
        for inputs, _ in loader(3):
            time.sleep(0.01)
            net(inputs)


@pytest.mark.parametrize(
    "evaluate", [evaluate_without_loader, evaluate_with_loader, evaluate_batches_without_gradients]
)
def test_evaluation_ends_a_pause_and_is_measured(
    script: Script, evaluate: Callable[[nn.Module], None]
) -> None:
    script.train_until_paused()
    samples = script.session.tracker.samples
    evaluate(script.net)
    assert not script.is_paused
    # What precedes the first call of the model may be anything.
    script.train(loader(2))
    totals = script.close()
    # The last of three sleeps is in any case part of it.
    assert totals["phases"]["evaluate"] >= 0.01
    assert totals["samples"] == samples + 8


def test_a_checkpoint_ends_a_pause_and_is_measured(script: Script, tmp_path: Path) -> None:
    steps = script.train_until_paused()
    torch.save(script.net.state_dict(), tmp_path / "model.pt")
    assert not script.is_paused
    script.train(loader(2))
    totals = script.close()
    assert totals["checkpoints"] == 1
    assert totals["phases"]["checkpoint"] > 0
    assert script.session.tracker.steps == steps + 2


def test_a_new_cell_of_a_notebook_ends_a_pause(script: Script) -> None:
    script.train_until_paused()
    script.session.divide_cells()
    assert not script.is_paused


def test_paused_steps_are_not_divided_like_a_window_with_time_between_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FACTOR_VARIABLE, "8")

    def train(name: str, seconds_between: float) -> Mapping[str, Any]:
        folder = tmp_path / name
        folder.mkdir()
        script = Script(folder)
        script.session.start()
        script.train(loader(24))
        script.session.divide_cells()
        time.sleep(seconds_between)
        script.session.divide_cells()
        script.train(loader(STEPS))
        totals = script.close()
        assert totals["paused_steps"] > STEPS / 2
        return totals

    train("first", 0.0)  # also what a process does only once
    plain, divided = (train(f"{seconds}", seconds)["phases"] for seconds in (0.0, 0.5))
    assert divided["other"] - 0.5 < plain["other"] + divided["forward"]


def test_the_next_epoch_of_the_same_data_does_not_end_a_pause(script: Script) -> None:
    batches = loader(30)
    paused = []
    for _ in range(10):
        for batch in batches:
            paused.append(script.is_paused)
            train_step(script.net, script.optimizer, *batch)
        paused.append(script.is_paused)
    # The factor is 8: more than half of the 300 steps are in pauses, with epochs of 30 steps.
    assert sum(paused) > len(paused) / 2


def test_losses_in_a_pause_are_not_known(script: Script) -> None:
    steps = script.train_until_paused()
    script.train(islice(script.batches, 5))
    script.session.close()
    (record,) = read_ranks(RunFolder(script.folder))
    losses = [loss for block in record.blocks for loss in block["loss"]]
    assert len(losses) == script.session.tracker.steps
    assert all(loss is not None for loss in losses[:steps])
    assert set(losses[steps:]) == {None}


def test_a_read_back_of_each_step_is_counted_in_pauses(script: Script) -> None:
    for inputs, targets in loader(STEPS):
        script.optimizer.zero_grad()
        loss = loss_of(script.net, inputs, targets)
        loss.backward()
        script.optimizer.step()
        loss.item()
    script.session.tracker.events.flush()
    assert script.session.tracker.paused_steps > 0
    script.session._calls.end_step()
    (site,) = script.session._calls.records()["calls"]
    assert site["count"] == STEPS


def test_nested_backward_passes_count_once(script: Script) -> None:
    script.train_until_paused()
    paused = script.session.tracker.paused
    weight = torch.ones(1, requires_grad=True)

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 1

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True)
                torch.autograd.grad((inner * 2).sum(), inner)
                time.sleep(0.02)
            return gradient

    before, began = paused.backward_seconds, time.perf_counter()
    output = Nested.apply(weight)  # type: ignore[no-untyped-call]
    output.sum().backward()
    assert 0.02 <= paused.backward_seconds - before <= time.perf_counter() - began
    assert not paused.is_in_backward


def test_an_exception_in_a_paused_step_changes_nothing(script: Script) -> None:
    script.train_until_paused()
    with pytest.raises(RuntimeError):
        torch.ones(2).backward()
    with pytest.raises(RuntimeError):
        script.net(torch.ones(1, 3))
    assert script.is_paused
    steps = script.session.tracker.steps
    script.train(islice(script.batches, 3))
    assert script.is_paused
    script.session.tracker.events.flush()
    assert script.session.tracker.steps == steps + 3


def phases(**milliseconds: float) -> dict[str, float]:
    return {name: milliseconds.get(name, 0.0) / 1e3 for name in PHASES}


USUAL = StepPhases(phases(forward=1, backward=0.5, exchange=0.5, update=0.5, other=0.5), 0.0005)
"""A step of 3 ms."""
STALLED = StepPhases({**USUAL.seconds, "exchange": 0.1005}, 0.1005)
FIRST_OF_EPOCH = StepPhases({**USUAL.seconds, "input": 0.1}, 0.0005)
LOGGED = StepPhases({**USUAL.seconds, "other": 0.1005}, 0.0005)


def test_a_window_without_time_leaves_the_rest_unknown() -> None:
    usual = UsualStep.of([StepPhases(phases(), 0.0)] * 16)
    assert usual.rest == {"other": 1.0}
    assert usual.exchange_share == 0


@pytest.mark.parametrize("long", [USUAL, STALLED, FIRST_OF_EPOCH, LOGGED])
def test_a_long_step_of_a_window_is_not_usual(long: StepPhases) -> None:
    usual = UsualStep.of([USUAL] * 15 + [long])
    assert usual.seconds == pytest.approx(0.003)
    assert usual.input_seconds == 0
    assert usual.backward_seconds == pytest.approx(0.001)
    assert usual.exchange_share == pytest.approx(0.5)
    assert usual.rest["forward"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("seconds", "last", "unfinished", "expected"),
    [
        (0.003, Measured(0, 0.001), Measured(0, 0), phases()),
        # Another rank evaluates; the pass is not known to be waiting.
        (0.103, Measured(0, 0.101), Measured(0, 0), phases(backward=50, exchange=50)),
        (0.103, Measured(0.1, 0.001), Measured(0, 0), phases(input=100)),
        (0.103, Measured(0, 0.001), Measured(0, 0), phases(other=100)),
        # The end of an epoch, for example.
        (0.003, Measured(0, 0.001), Measured(0.1, 0), phases(input=100, other=-100)),
    ],
    ids=["usual", "backward", "input", "other", "unfinished step"],
)
def test_the_excess_of_a_long_step_is_where_it_was_measured(
    seconds: float, last: Measured, unfinished: Measured, expected: dict[str, float]
) -> None:
    usual, clock = UsualStep.of([USUAL] * 16), PhaseClock(lambda: 0.0)
    # Backward passes are a little faster than in the window.
    steps = [Measured(0, 0.0009)] * 299 + [last]
    step_seconds = [0.0029] * 299 + [seconds]
    noted = Noted(
        sum(step.input_seconds for step in steps) + unfinished.input_seconds,
        sum(step.backward_seconds for step in steps) + unfinished.backward_seconds,
        0,
        steps,
    )
    usual.divide(clock, step_seconds, noted, 0.0)
    divided = dict(clock.known_seconds)
    divided["other"] += math.fsum(step_seconds)
    usual_part = phases(forward=300, backward=135.05, exchange=135.05, update=150, other=150)
    for name in PHASES:
        wanted = usual_part[name] + expected[name]
        assert divided[name] == pytest.approx(wanted, abs=1e-6), name


def test_a_pause_does_not_keep_the_dataset(script: Script) -> None:
    script.train_until_paused()
    dataset = weakref.ref(script.batches.dataset)
    del script.batches
    gc.collect()
    assert script.is_paused
    assert dataset() is None


def test_the_loss_of_a_pass_that_was_scaled_in_a_pause_is_not_known(
    script: Script, tmp_path: Path
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    losses = []
    for step, batch in enumerate(loader(STEPS)):
        loss = loss_of(script.net, *batch)
        losses.append(float(loss.detach()))
        scaled = scaler.scale(loss)
        if script.is_paused and step % 10 == 9:
            torch.save(script.net.state_dict(), tmp_path / "model.pt")
        scaled.backward()
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
    script.session.close()
    (record,) = read_ranks(RunFolder(script.folder))
    known = [loss for block in record.blocks for loss in block["loss"] if loss is not None]
    assert record.last["checkpoints"] > 1
    assert max(known) <= max(losses)


def test_steps_that_a_scaler_skips_in_a_pause_are_counted(script: Script) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    steps = script.train_until_paused()
    for step, batch in enumerate(islice(script.batches, 10)):
        loss = loss_of(script.net, *batch) * (math.inf if step % 3 == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
        assert script.is_paused
    totals = script.close()
    assert script.session.tracker.steps == steps + 10
    assert min(totals["phases"].values()) >= 0
    assert not warnings_of(script)


def warnings_of(script: Script) -> list[Mapping[str, Any]]:
    (record,) = read_ranks(RunFolder(script.folder))
    return [event for event in record.events if event["event"] == "warning"]


def test_steps_that_another_thread_ends_do_not_stop_the_profiler(script: Script) -> None:
    script.train_until_paused()
    thread = Thread(target=script.session.end_step)
    thread.start()
    thread.join()
    script.train(islice(script.batches, 3))
    script.close()
    assert not warnings_of(script)


def test_a_step_whose_closure_ends_the_pause_is_counted(script: Script) -> None:
    steps = script.train_until_paused()
    batch = next(iter(script.batches))

    def closure() -> torch.Tensor:
        script.optimizer.zero_grad()
        loss = loss_of(script.net, *batch)
        loss.backward()
        evaluate_without_loader(script.net)
        return loss

    script.optimizer.step(closure)
    assert not script.is_paused
    script.train(loader(2))
    totals = script.close()
    assert script.session.tracker.steps == steps + 3
    assert totals["phases"]["evaluate"] >= 0.03


def test_the_next_epoch_of_a_list_does_not_end_a_pause(script: Script) -> None:
    samples = [(torch.ones(2), torch.zeros(2))] * 120
    paused = []
    for _ in range(10):
        for batch in DataLoader(samples, batch_size=4):  # type: ignore[arg-type]  # it may be one
            paused.append(script.is_paused)
            train_step(script.net, script.optimizer, *batch)
    assert sum(paused) > len(paused) / 2


def test_a_collective_inside_a_dataset_does_not_lose_the_batch(script: Script) -> None:
    script.train_until_paused()

    class Gathering(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            if index == 1:
                time.sleep(0.02)
                script.session._windows.before_call()  # type: ignore[union-attr]
                time.sleep(0.02)
            return torch.ones(2), torch.zeros(2)

    tracker = script.session.tracker
    samples, before = tracker.samples, dict(tracker.clock.known_seconds)
    data = Gathering()
    tracker.paused.dataset_id = id(data)
    script.train(DataLoader(data, batch_size=4))
    totals = script.close()
    assert totals["phases"]["input"] - before["input"] >= 0.04
    assert totals["samples"] == samples + 8


def test_steps_of_a_new_optimizer_are_counted(script: Script) -> None:
    steps = script.train_until_paused()
    script.optimizer = SGD(script.net.parameters(), lr=0.01)
    script.train(script.batches)
    script.close()
    assert script.session.tracker.steps == steps + STEPS


def test_samples_of_two_loaders_in_a_step_count_once(script: Script) -> None:
    one, other = loader(STEPS), loader(STEPS)
    for batch, _ in zip(one, other, strict=True):
        train_step(script.net, script.optimizer, *batch)
    totals = script.close()
    assert totals["samples"] == 4 * STEPS
    batches = [each["batches"] for each in script.session._calls.records()["loaders"]]
    assert batches == [STEPS, STEPS]


def test_batches_that_arrive_before_the_step_before_ends_count_once(
    script: Script, tmp_path: Path
) -> None:
    batches = iter(script.batches)
    batch = next(batches)
    for step in range(STEPS - 1):
        script.optimizer.zero_grad()
        loss_of(script.net, *batch).backward()
        batch = next(batches)
        if step % 40 == 39:
            torch.save(script.net.state_dict(), tmp_path / "model.pt")
        script.optimizer.step()
    # No model was trained on the last one.
    assert script.close()["samples"] == 4 * (STEPS - 1)


def test_a_loader_inside_a_dataset_is_part_of_its_input(script: Script) -> None:
    class Nested(IterableDataset[Any]):
        def __init__(self) -> None:
            self.inner = loader(STEPS)

        def __iter__(self) -> Iterator[Any]:
            yield from self.inner

    script.train(DataLoader(Nested(), batch_size=None))
    totals = script.close()
    assert script.session.tracker.paused_steps > 0
    assert totals["samples"] == 4 * STEPS
    assert min(totals["phases"].values()) >= 0


def test_a_model_inside_a_dataset_is_part_of_its_input(script: Script) -> None:
    class Encoded(Dataset[Any]):
        encoder = nn.Linear(2, 2).eval()

        def __len__(self) -> int:
            return 4 * STEPS

        def __getitem__(self, index: int) -> Any:
            with torch.no_grad():
                return self.encoder(torch.ones(2)), torch.zeros(2)

    script.train(DataLoader(Encoded(), batch_size=4))
    totals = script.close()
    assert script.session.tracker.paused_steps > 0
    assert totals["samples"] == 4 * STEPS
    assert totals["phases"]["evaluate"] == 0


def test_evaluation_of_a_model_with_gradients_ends_a_pause(script: Script) -> None:
    script.train_until_paused()
    samples = script.session.tracker.samples
    script.net.eval()
    for inputs, _ in islice(script.batches, 5):
        script.net(inputs)
    script.net.train()
    script.train(islice(script.batches, 3))
    totals = script.close()
    assert totals["samples"] == samples + 12
    assert totals["phases"]["evaluate"] > 0


def test_steps_that_the_script_ends_itself_end_a_pause(script: Script) -> None:
    steps = script.train_until_paused()
    for batch in islice(script.batches, 10):
        train_step(script.net, script.optimizer, *batch)
        script.session.end_step()
    script.close()
    # The first step of an optimizer is counted before it is known that it does not end steps.
    assert steps + 10 <= script.session.tracker.steps <= steps + 11


def test_a_collective_in_a_backward_pass_does_not_lose_the_pass(script: Script) -> None:
    script.train_until_paused()
    clock = script.session.tracker.clock
    assert script.session._windows is not None
    weight = torch.ones(1, requires_grad=True)

    def hook(gradient: torch.Tensor) -> None:
        time.sleep(0.02)
        script.session._windows.before_call()  # type: ignore[union-attr]
        assert not script.is_paused
        time.sleep(0.02)

    weight.register_hook(hook)
    before = clock.known_seconds["backward"]
    (weight * 2).sum().backward()
    script.session.tracker.events.flush()
    assert clock.known_seconds["backward"] - before >= 0.04
    assert clock.phase == "other"
