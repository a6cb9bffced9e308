"""Phases and steps of loops that know nothing of paceline."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from paceline.measure.phase_clock import CudaPhaseClock, PhaseClock
from paceline.profiler.collection import read_ranks
from paceline.profiler.overhead import HookCosts
from paceline.profiler.rank_log import RankLog
from paceline.profiler.step_window import StepWindow
from paceline.profiler.tracking import step_tracker
from paceline.profiler.tracking.notes import loss_of as loss_value
from paceline.profiler.tracking.notes import update_notes
from paceline.records import RunFolder
from tests.support.profiled import STEP, loader, loss_of, model, profiled, sgd, train_step


class HostMarks:
    """Marks of a GPU that is always done."""

    def __init__(self) -> None:
        self.at = perf_counter()

    def record(self, _: object) -> HostMarks:
        return HostMarks()

    record_in_graph = record_anchor = record

    def use_current_stream(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: HostMarks) -> float:
        return 1000 * (end.at - self.at)


def host_clock(_: torch.device, before: PhaseClock) -> PhaseClock:
    return CudaPhaseClock(before, HostMarks())  # type: ignore[arg-type]


def test_a_step_has_input_forward_backward_and_update(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for inputs, targets in loader(3):
            train_step(net, optimizer, inputs, targets)
    # The last request for a batch finds none.
    assert measured.phases == [*STEP * 3, "input"]
    record = measured.record
    assert len(record.step_seconds) == 3
    assert len(record.losses) == 3
    assert record.last["samples"] == 12
    assert record.last["learning_rate"] == 0.1


def test_samples_are_those_that_a_model_is_trained_on(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for _ in range(2):
            next(iter(loader(1)))
            batches = iter(loader(3))
            # Loaders may request a batch ahead.
            ahead = next(batches)
            for batch in batches:
                train_step(net, optimizer, *ahead)
                ahead = batch
            train_step(net, optimizer, *ahead)
            net.eval()
            for inputs, _ in loader(2):
                with torch.no_grad():
                    net(inputs)
            for inputs, _ in loader(2):
                net(inputs)
            net.train()
    assert len(measured.record.step_seconds) == 6
    assert measured.record.last["samples"] == 24


def test_samples_of_a_freed_iterator_do_not_count() -> None:
    class Batches:
        pass

    tracker = step_tracker.StepTracker(lambda: None)

    def get_batch(batches: Batches) -> None:
        iterator = weakref.ref(batches)
        tracker.begin_input(iterator, True)
        tracker.end_input(iterator, 4)

    looked_at = Batches()
    get_batch(looked_at)
    address = id(looked_at)
    del looked_at
    # One of them is where the freed one was.
    found = [Batches() for _ in range(1000)]
    (trained,) = [each for each in found if id(each) == address]
    get_batch(trained)
    tracker.begin_backward(True, None, 0.0)
    assert tracker.samples == 4


def test_phases_sum_to_the_wall_time(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for inputs, targets in loader(5):
            train_step(net, optimizer, inputs, targets)
    clock = measured.session.tracker.clock
    assert sum(clock.seconds.values()) == pytest.approx(clock.wall_seconds, rel=1e-6)
    assert measured.record.wall_seconds == pytest.approx(clock.wall_seconds, rel=0.01)


def test_clearing_the_gradients_is_part_of_the_update(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for batch in loader(2):
            optimizer.zero_grad()
            loss = loss_of(net, *batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
            optimizer.zero_grad()
    # The first step begins with the first batch.
    cleared = ["input", "update", "forward", "update", "forward", "backward", "update"]
    assert measured.phases == [*cleared * 2, "input"]
    assert len(measured.record.step_seconds) == 2


def test_clearing_the_gradients_is_one_event_with_two_times(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        events = measured.session.tracker.events
        for batch in loader(3):
            train_step(net, optimizer, *batch)
        events.flush()
        noted = events.noted
        began = perf_counter()
        optimizer.zero_grad()
        ended = perf_counter()
        events.flush()
        assert events.noted == noted + 1
        cleared = measured.log.phases[-1]
    assert cleared.name == "update"
    assert began < cleared.began < cleared.ended < ended


def test_what_precedes_clearing_after_the_backward_pass_is_update(tmp_path: Path) -> None:
    """As between the backward pass and the step."""
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for batch in loader(2):
            loss_of(net, *batch).backward()
            optimizer.zero_grad()
            optimizer.step()
    names = [span.name for span in measured.log.phases]
    after = names[names.index("backward") + 1 :]
    assert after[: after.index("input")].count("other") == 1


def test_clearing_the_gradients_outside_a_step_is_no_update(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        optimizer.zero_grad()
        train_step(net, optimizer, *next(iter(loader(1))))
        net.eval()
        with torch.no_grad():
            net(torch.ones(4, 2))
        optimizer.zero_grad()
    assert measured.phases == [*STEP, "evaluate"]


def test_gradient_accumulation_is_one_step(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for number, (inputs, targets) in enumerate(loader(4)):
            loss_of(net, inputs, targets).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert measured.phases == [*(STEP[:3] * 2 + ["update"]) * 2, "input"]
    assert len(measured.record.step_seconds) == 2


def test_replayed_graphs_are_forward_passes(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for inputs, targets in loader(3):
            loss_of(net, inputs, targets)
            measured.session.tracker.clock.enter("other")
            # What the hook of `CUDAGraph.replay` calls: there is no GPU here.
            measured.session.tracker.replay_graph()
            optimizer.step()
    assert measured.phases == [*["input", "forward", "update"] * 3, "input"]
    assert measured.record.last["samples"] == 12


def test_a_captured_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(
        step_tracker.StepTracker, "_device_of", staticmethod(lambda _: torch.device("cuda"))
    )
    monkeypatch.setattr(step_tracker, "clock_for", host_clock)
    found = []
    tracker = step_tracker.StepTracker(lambda: None, lambda: found.append("GPU"))
    optimizer = sgd(model())
    begin, end = update_notes(tracker)
    for capturing[0] in (True, True, False, True, False):
        begin(optimizer)
        end(optimizer)
    assert tracker.steps == 2
    # Events of the clock must not be recorded during a capture.
    assert found == ["GPU"]
    assert len(tracker.clock.step_seconds) == 2


def test_a_step_of_two_optimizers_ends_with_the_second(tmp_path: Path) -> None:
    nets = [model(), model()]
    optimizers = [sgd(net) for net in nets]
    with profiled(tmp_path) as measured:
        for inputs, targets in loader(3):
            for net, optimizer in zip(nets, optimizers, strict=True):
                train_step(net, optimizer, inputs, targets)
    assert measured.phases == [*(STEP + STEP[1:]) * 3, "input"]
    assert len(measured.record.step_seconds) == 3


def test_steps_go_on_when_the_optimizer_that_ended_them_is_no_longer_used(tmp_path: Path) -> None:
    nets = [model(), model()]
    optimizers = [sgd(net) for net in nets]
    with profiled(tmp_path) as measured:
        for number, batch in enumerate(loader(40)):
            train_step(nets[0], optimizers[0], *batch)
            if number < 3:
                train_step(nets[1], optimizers[1], *batch)
    assert len(measured.record.step_seconds) == 40


def test_optimizers_that_alternate_by_epoch_end_steps(tmp_path: Path) -> None:
    nets = [model(), model()]
    optimizers = [sgd(net) for net in nets]
    with profiled(tmp_path) as measured:
        for epoch in range(4):
            for batch in loader(10):
                train_step(nets[epoch % 2], optimizers[epoch % 2], *batch)
    assert len(measured.record.step_seconds) == 40


def test_a_generator_that_steps_after_several_steps_of_the_critic(tmp_path: Path) -> None:
    nets = [model(), model()]
    optimizers = [sgd(net) for net in nets]
    with profiled(tmp_path) as measured:
        for number, batch in enumerate(loader(15)):
            train_step(nets[0], optimizers[0], *batch)
            if number % 5 == 4:
                train_step(nets[1], optimizers[1], *batch)
    # One for each batch; the first step of the generator is taken for another one.
    assert len(measured.record.step_seconds) == 16


def test_optimizers_of_single_parameters_step_together(tmp_path: Path) -> None:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    optimizers = [SGD([each], lr=0.1) for each in net.parameters()]
    with profiled(tmp_path) as measured:
        for batch in loader(5):
            loss_of(net, *batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert len(measured.record.step_seconds) == 5


def test_a_closure_is_part_of_the_step(tmp_path: Path) -> None:
    net = model()
    optimizer = LBFGS(net.parameters(), max_iter=1)
    with profiled(tmp_path) as measured:
        for inputs, targets in loader(2):

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, inputs, targets)
                loss.backward()
                return loss

            optimizer.step(closure)
    step = ["input", "update", "forward", "backward", "update"]
    assert measured.phases == [*step * 2, "input"]
    assert len(measured.record.step_seconds) == 2


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_step_that_the_grad_scaler_skips_counts(tmp_path: Path, is_finite: bool) -> None:
    net = model()
    optimizer = sgd(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with profiled(tmp_path) as measured:
        for number, (inputs, targets) in enumerate(loader(3)):
            loss = loss_of(net, inputs, targets)
            if number == 1 and not is_finite:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert len(measured.record.step_seconds) == 3


def test_the_loss_is_that_before_the_grad_scaler(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected = []
    with profiled(tmp_path) as measured:
        for inputs, targets in loader(3):
            loss = loss_of(net, inputs, targets)
            expected.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert measured.record.losses == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_losses_are_recorded_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    net = model().to(dtype)
    optimizer = sgd(net)
    expected = []
    with profiled(tmp_path) as measured:
        for inputs, targets in loader(4):
            loss = loss_of(net, inputs.to(dtype), targets.to(dtype))
            expected.append(loss.item())
            loss.backward()
            optimizer.step()
    assert measured.record.losses == expected


def test_no_tensor_on_the_host_outlives_its_step(tmp_path: Path) -> None:
    """It would be in the way of the allocator (docs/design-notes.md)."""
    net = model()
    optimizer = sgd(net)
    tensors = []
    with profiled(tmp_path) as measured:
        for batch in loader(5):
            train_step(net, optimizer, *batch)
            # What was noted waits.
            events = measured.session.tracker.events
            events.due, events.due_update = math.inf, sys.maxsize
            tensors.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    assert tensors[1:] == tensors[:1] * 4


class Watched(Tensor):
    """A tensor of a library, which may not be on the host."""


@pytest.mark.parametrize(
    ("scalar", "kind"),
    [
        (torch.tensor(0.5, requires_grad=True), float),
        (torch.tensor(0.5, dtype=torch.float64), float),
        (torch.tensor(0.5).as_subclass(Watched), Tensor),
        (torch.tensor(0.5, device="meta"), Tensor),
        (torch.tensor([0.5, 1.0]), type(None)),
        (torch.tensor(0.5 + 1j), type(None)),
        (torch.tensor(3), type(None)),
        ((), type(None)),
        (None, type(None)),
    ],
)
def test_only_a_scalar_is_a_loss(scalar: Any, kind: type) -> None:
    assert isinstance(loss_value(scalar), kind)
    assert isinstance(loss_value((scalar, torch.tensor(1.0))), kind if scalar != () else type(None))


def test_a_loss_that_cannot_be_read_is_none() -> None:
    found: list[Any] = []

    def each(value: Tensor) -> Tensor:
        found.append(loss_value(value))
        return value

    torch.vmap(each)(torch.ones(3))
    assert found == [None]


def test_losses_of_several_devices_are_recorded_in_order(tmp_path: Path) -> None:
    """A tensor stands for one on a GPU: it is read when a block of records is written."""
    tracker = step_tracker.StepTracker(lambda: None)
    log = RankLog(RunFolder(tmp_path), HookCosts(), StepWindow())
    losses: list[step_tracker.Loss | None] = [0.5, torch.tensor(1.5), None, 2.5, torch.tensor(3.5)]
    for tracker.loss in losses:
        tracker.end_step()
        log.step(tracker)
    log.close(tracker)
    (record,) = read_ranks(RunFolder(tmp_path))
    assert record.losses == [0.5, 1.5, 2.5, 3.5]


def test_an_optimizer_inside_another_is_part_of_its_step(tmp_path: Path) -> None:
    net = model()
    inner = sgd(net)

    class Outer(Optimizer):
        def __init__(self) -> None:
            super().__init__(net.parameters(), {})

        def step(self, closure: Any = None) -> Any:
            inner.step()

    outer = Outer()
    with profiled(tmp_path) as measured:
        for batch in loader(3):
            train_step(net, outer, *batch)
    assert measured.phases == [*STEP * 3, "input"]
    assert len(measured.record.step_seconds) == 3


def test_files_that_are_saved_between_two_steps_are_one_checkpoint(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for batch in loader(2):
            train_step(net, optimizer, *batch)
            for name in ("model", "optimizer"):
                torch.save(net.state_dict(), tmp_path / f"{name}.pt")
    assert measured.record.last["checkpoints"] == 2


def test_a_model_that_is_no_module_is_forward(tmp_path: Path) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    optimizer = SGD([weight], lr=0.1)
    with profiled(tmp_path) as measured:
        for inputs, targets in loader(2):
            nn.functional.mse_loss(inputs @ weight, targets).backward()
            optimizer.step()
    assert measured.phases == [*STEP * 2, "input"]


def test_gradients_of_a_penalty_are_part_of_the_step(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for inputs, targets in loader(2):
            inputs.requires_grad_()
            loss = loss_of(net, inputs, targets)
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            (loss + slope.square().sum()).backward()
            optimizer.step()
    step = ["input", "forward", "backward", "forward", "backward", "update"]
    assert measured.phases == [*step * 2, "input"]


def test_clipping_is_part_of_update(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for inputs, targets in loader(2):
            loss_of(net, inputs, targets).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    names = [span.name for span in measured.log.phases]
    assert names[names.index("backward") + 1] == "update"


def test_checkpoints_are_a_phase_of_their_own(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for batch in loader(2):
            train_step(net, optimizer, *batch)
            torch.save(net.state_dict(), tmp_path / "weights.pt")
    assert measured.phases == [*[*STEP, "checkpoint"] * 2, "input"]
    assert measured.record.last["checkpoints"] == 2


def test_a_step_is_as_long_as_its_phases(tmp_path: Path) -> None:
    """Evaluation and checkpoints after the request for a batch, and in the middle of a step."""
    net = model()
    optimizer = sgd(net)

    def evaluate() -> None:
        with torch.no_grad():
            for inputs, _ in loader(2):
                net(inputs)

    with profiled(tmp_path) as measured:
        for _ in range(3):
            for number, batch in enumerate(loader(4)):
                if number == 1:
                    evaluate()
                    torch.save(net.state_dict(), tmp_path / "saved")
                    evaluate()
                optimizer.zero_grad()
                loss = loss_of(net, *batch)
                if number == 2:
                    torch.save(net.state_dict(), tmp_path / "saved")
                loss.backward()
                optimizer.step()
                # Up to the end of the step.
                clock = measured.session.tracker.clock
                spent, steps = dict(clock.seconds), clock.step_seconds[1:]
            evaluate()
    outside = spent["evaluate"] + spent["checkpoint"]
    since_first = clock.started + sum(spent.values()) - measured.log.steps[0].ended
    assert len(steps) == 3 * 4 - 1
    assert sum(steps) + outside == pytest.approx(since_first)
    # Evaluations and checkpoints follow each other, and each is noted once, also the last one.
    phases = measured.record.last["phases"]
    noted = sum(end - begin for begin, end in measured.record.interruptions)
    assert noted == pytest.approx(phases["evaluate"] + phases["checkpoint"], abs=1e-5)


def test_input_of_worker_processes(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for batch in loader(3, num_workers=1):
            train_step(net, optimizer, *batch)
    assert measured.phases == [*STEP * 3, "input"]
    assert [file.name for file in tmp_path.glob("events*")] == ["events-0.jsonl"]


def test_steps_and_phases_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_tracker, "clock_for", host_clock)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        monkeypatch.setattr(step_tracker.StepTracker, "_device_of", lambda *_: torch.device("cuda"))
        for batch in loader(6):
            train_step(net, optimizer, *batch)
    record = measured.record
    assert len(record.step_seconds) == 6
    assert min(record.step_seconds) > 0
    assert sum(record.step_seconds) <= record.wall_seconds
    clock = measured.session.tracker.clock
    assert isinstance(clock, CudaPhaseClock)
    # The two are read one after the other.
    assert sum(clock.seconds.values()) == pytest.approx(clock.wall_seconds, rel=0.01, abs=1e-3)


@pytest.mark.parametrize("is_behind", [False, True])
def test_time_that_passes_while_the_gpu_works_is_not_overhead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_behind: bool
) -> None:
    monkeypatch.setattr(HostMarks, "query", lambda _: not is_behind)
    monkeypatch.setattr(step_tracker, "clock_for", host_clock)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        monkeypatch.setattr(step_tracker.StepTracker, "_device_of", lambda *_: torch.device("cuda"))
        for batch in loader(2 * step_tracker.CHECK_STEPS):
            train_step(net, optimizer, *batch)
    last = measured.record.last
    assert last["measuring_host_seconds"] > 0
    assert last["measuring_seconds"] == (0 if is_behind else last["measuring_host_seconds"])
