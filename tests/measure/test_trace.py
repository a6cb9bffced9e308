"""Traces of iterations: complete, consistent with the phase clock, and only on request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator
from paceline.comm.work import CompletedWork, Work
from paceline.config import RunConfig
from paceline.launch.launcher import train
from paceline.measure import phase_clock as clock_module
from paceline.measure import timeline as timeline_module
from paceline.measure import traffic as traffic_module
from paceline.measure.phase_clock import PhaseClock, PhaseLog, Span
from paceline.measure.timeline import Moment
from paceline.measure.trace import WARM_UP_ITERATIONS, Tracer
from paceline.measure.trace_file import TraceEvent, merge_traces, write_trace
from paceline.measure.traffic import Traffic
from paceline.records import RunFolder, read_iteration_seconds, read_json
from paceline.strategies import create_strategy
from paceline.strategies.replica import Replica
from tests.support import toy_replicas as toy

Event = dict[str, Any]


class ManualClock:
    """A clock that the test advances in whole seconds, so that sums are exact.

    What is due on the way is done at its moment.
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        until = self.now + seconds
        while self.due and self.due[0][0] <= until:
            self.now, action = self.due.pop(0)
            action()
        self.now = until


@pytest.fixture
def manual(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    manual = ManualClock()
    for module in (clock_module, traffic_module, timeline_module):
        monkeypatch.setattr(module, "perf_counter", manual)
    return manual


def written(tracer: Tracer, folder: Path) -> dict[str, Any]:
    tracer.write(folder / "trace.json", rank=0, node=0, offset_seconds=0.0)
    return read_json(folder / "trace.json")


def of_category(trace: dict[str, Any], category: str) -> list[Event]:
    return [event for event in trace["traceEvents"] if event.get("cat") == category]


def test_tracing_skips_warm_up_iterations(manual: ManualClock, tmp_path: Path) -> None:
    clock = PhaseClock()
    tracer = Tracer(clock, Traffic(), iterations=2, done=0, left=100)
    for number in range(20):
        tracer.before_iteration(number)
        clock.begin_step("input")
        manual.move(number + 1)
        clock.end_step("other")
        manual.move(1)
    trace = written(tracer, tmp_path)
    first = WARM_UP_ITERATIONS
    assert trace["iterations"] == [
        {"iteration": first, "ts": 0, "dur": (first + 1) * 1e6},
        {"iteration": first + 1, "ts": (first + 2) * 1e6, "dur": (first + 2) * 1e6},
    ]
    assert trace["began_seconds"] == 100 + sum(n + 2 for n in range(first))


@pytest.mark.parametrize(("left", "first"), [(3, 0), (4, 1), (13, WARM_UP_ITERATIONS)])
def test_short_run_is_traced_from_an_earlier_iteration(
    manual: ManualClock, tmp_path: Path, left: int, first: int
) -> None:
    clock = PhaseClock()
    tracer = Tracer(clock, Traffic(), iterations=3, done=0, left=left)
    for number in range(left):
        tracer.before_iteration(number)
        clock.begin_step("input")
        manual.move(1)
        clock.end_step("other")
    numbers = [each["iteration"] for each in written(tracer, tmp_path)["iterations"]]
    assert numbers == [first, first + 1, first + 2]


def test_relabel_splits_waiting_from_the_exchange() -> None:
    log = PhaseLog(
        [Span("backward", 0, 4), Span("exchange", 4, 9), Span("update", 9, 10)],
        [Span("step", 0, 9)],
    )
    log.relabel("exchange", "wait", 5, 7)
    assert log.phases == [
        Span("backward", 0, 4),
        Span("exchange", 4, 5),
        Span("wait", 5, 7),
        Span("exchange", 7, 9),
        Span("update", 9, 10),
    ]


@pytest.mark.parametrize(("began", "ended"), [(-3, -1), (12, 14), (0, 4), (5, 5)])
def test_relabel_ignores_other_phases(began: float, ended: float) -> None:
    log = PhaseLog([Span("backward", 0, 4), Span("exchange", 4, 9)])
    log.relabel("exchange", "wait", began, ended)
    assert [span.name for span in log.phases if span.name == "wait"] == []
    assert sum(span.ended - span.began for span in log.phases) == 9


def test_overlapping_transfers_are_on_separate_threads(manual: ManualClock, tmp_path: Path) -> None:
    clock, traffic = PhaseClock(), Traffic()
    tracer = Tracer(clock, traffic, iterations=1, done=0, left=1)
    tracer.before_iteration(0)
    clock.begin_step("exchange")
    one = traffic.begin("gradients", bytes_sent=5, bytes_received=3, messages=1)
    manual.move(2)
    other = traffic.begin("metrics", bytes_sent=1, messages=1)
    manual.move(2)
    traffic.end(one)
    third = traffic.begin("control")
    manual.move(2)
    traffic.end(other)
    traffic.end(third)
    clock.end_step("other")
    transfers = of_category(written(tracer, tmp_path), "transfer")
    seen = [(e["name"], e["tid"], e["ts"] / 1e6, e["dur"] / 1e6) for e in transfers]
    assert seen == [
        ("gradients", 1002, 0, 4),
        ("metrics", 1003, 2, 4),
        ("control", 1002, 4, 2),
    ]
    assert transfers[0]["args"]["bytes"] == 8


def write_step(folder: RunFolder, rank: int, began: float, offset_seconds: float) -> None:
    step = TraceEvent("step", began, began + 1)
    write_trace(
        folder.trace_file(rank),
        rank,
        0,
        offset_seconds=offset_seconds,
        first_iteration=0,
        steps=[step],
        phases=[step._replace(name="forward")],
        transfers=[],
    )


def test_merged_trace_has_all_ranks_on_the_clock_of_the_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_step(folder, 0, began=100.25, offset_seconds=0.0)
    write_step(folder, 1, began=7.0, offset_seconds=93.0)
    merge_traces(folder, range(2))
    phases = of_category(read_json(folder.merged_trace_file), "phase")
    assert [(event["pid"], event["ts"] / 1e6) for event in phases] == [(1000, 0.25), (2000, 0)]


@pytest.mark.parametrize(
    "contents",
    ["", "[]", "{}", '{"began_seconds": null, "traceEvents": []}']
    + [
        f'{{"began_seconds": 1, "traceEvents": {events}}}'
        for events in ("3", "[3]", '[{"ts": ""}]')
    ],
)
def test_merged_trace_leaves_out_damaged_ranks(tmp_path: Path, contents: str) -> None:
    folder = RunFolder(tmp_path)
    write_step(folder, 0, began=100.0, offset_seconds=0.0)
    folder.trace_file(1).write_text(contents)
    merge_traces(folder, range(3))
    phases = of_category(read_json(folder.merged_trace_file), "phase")
    assert [event["pid"] for event in phases] == [1000]


def test_merged_trace_needs_the_trace_of_a_rank(tmp_path: Path) -> None:
    merge_traces(RunFolder(tmp_path), range(2))
    assert list(tmp_path.iterdir()) == []


class SlowLine(Communicator):
    """Rank 0 of two; every all-reduce takes three seconds, and several overlap."""

    def __init__(self, manual: ManualClock, traffic: Traffic) -> None:
        super().__init__(0, 2, 1.0, traffic)
        self._hand = manual

    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        transfer = self.traffic.begin(kind, bytes_sent=tensor.nbytes)
        return self.track_transfer(_DelayedWork(self._hand, 3.0), transfer)

    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        return CompletedWork()

    def send(self, tensor: Tensor, to: int, kind: str) -> Work:
        raise NotImplementedError

    def recv(self, tensor: Tensor, source: int, kind: str) -> Work:
        raise NotImplementedError

    def dup(self, traffic: Traffic | None = None) -> Self:
        return type(self)(self._hand, traffic or self.traffic)

    def _disconnect(self) -> None:
        return


class _DelayedWork(Work):
    def __init__(self, manual: ManualClock, seconds: float) -> None:
        super().__init__()
        self._hand, self._arrives = manual, manual.now + seconds

    def add_done_callback(self, action: Callable[[Moment], None]) -> None:
        self._hand.due.append((self._arrives, lambda: action(self._arrives)))

    def _block(self) -> None:
        self._hand.move(max(0.0, self._arrives - self._hand.now))

    def _poll(self) -> bool:
        return self._arrives <= self._hand.now


class SlowInTheMiddle(nn.Module):
    """Its backward pass takes four seconds between the gradients of the second and first layer."""

    def __init__(self, manual: ManualClock) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self._hand = manual

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        hidden.register_hook(lambda gradient: self._hand.move(4))
        outputs: Tensor = self.second(hidden)
        return outputs


def replica_on(communicator: Communicator, model: nn.Module) -> Replica:
    return Replica(
        model=model,
        optimizer=toy.sgd()(list(model.parameters())),
        clock=PhaseClock(),
        forward=model,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        communicator=communicator,
    )


class _LateNoticedWork(_DelayedWork):
    """Work whose completion is noticed only by `wait()`, which then knows the completion time."""

    def add_done_callback(self, action: Callable[[Moment], None]) -> None:
        Work.add_done_callback(self, action)

    def _block(self) -> None:
        super()._block()
        self._complete(self._arrives)


class UnwatchedLine(SlowLine):
    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        return _LateNoticedWork(self._hand, 3.0)


def test_late_wait_counts_as_overlapped_until_completion(manual: ManualClock) -> None:
    """The all-reduce completes one second before the backward pass."""
    replica = replica_on(UnwatchedLine(manual, Traffic()), SlowInTheMiddle(manual))
    strategy = create_strategy("overlap", {"bucket_mib": "0", "first_bucket_mib": "0"})
    strategy.setup(replica)
    strategy.backward(replica.forward(torch.ones(1, 2)).sum())
    strategy.step()
    strategy.finish()
    assert replica.hidden_exchange_seconds == 3


def test_overlapped_communication_appears_as_transfers_during_other_phases(
    manual: ManualClock, tmp_path: Path
) -> None:
    """Of two all-reduces of 3 s each, one starts 4 s before the backward pass ends."""
    line = SlowLine(manual, Traffic())
    replica = replica_on(line, SlowInTheMiddle(manual))
    strategy = create_strategy("overlap", {"bucket_mib": "0", "first_bucket_mib": "0"})
    strategy.setup(replica)
    tracer = Tracer(replica.clock, line.traffic, iterations=1, done=1, left=1)
    for number in range(2):
        hidden_before = replica.hidden_exchange_seconds
        tracer.before_iteration(number)
        replica.clock.begin_step("backward")
        strategy.backward(replica.forward(torch.ones(1, 2)).sum())
        strategy.step()
        replica.clock.end_step("other")
    trace = written(tracer, tmp_path)
    strategy.finish()
    beside = [
        (event["ts"], event["dur"])
        for event in of_category(trace, "transfer")
        if phase_at(trace, event["ts"]) == "backward"
    ]
    assert set(beside) == {(0, 3e6)}
    assert replica.hidden_exchange_seconds - hidden_before == 3


def phase_at(trace: dict[str, Any], moment: float) -> str:
    phases = of_category(trace, "phase")
    names = [e["name"] for e in phases if e["ts"] <= moment < e["ts"] + e["dur"]]
    assert len(names) == 1, "the clock is in one phase at a time"
    return str(names[0])


def short_run(out: Path, **settings: Any) -> Path:
    config = RunConfig(
        data="digits",
        train_samples=64,
        test_samples=16,
        model="softmax",
        batch_size=16,
        iterations=4,
        threads=1,
        out=str(out),
        name="run",
        sample_seconds=0,
        tensorboard=False,
        **settings,
    )
    assert train(config, quiet=True).exit_code == 0
    return out / "run"


def test_phases_cover_a_traced_iteration_without_gaps(tmp_path: Path) -> None:
    folder = short_run(tmp_path, trace=3)
    trace = read_json(folder / "trace-0.json")
    recorded = read_iteration_seconds(folder / "events-0.jsonl", 4)
    assert [each["iteration"] for each in trace["iterations"]] == [1, 2, 3]
    for each in trace["iterations"]:
        inside = [
            event
            for event in of_category(trace, "phase")
            if event["args"]["iteration"] == each["iteration"]
        ]
        ends = [event["ts"] + event["dur"] for event in inside]
        assert [event["ts"] for event in inside[1:]] == pytest.approx(ends[:-1], abs=0.01)
        assert inside[0]["ts"] == each["ts"]
        length_seconds = sum(event["dur"] for event in inside) / 1e6
        assert length_seconds == pytest.approx(recorded[each["iteration"]], abs=1e-6)


def test_no_trace_by_default(tmp_path: Path) -> None:
    assert list(short_run(tmp_path).glob("trace-*")) == []
