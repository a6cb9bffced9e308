"""The timeline of traced iterations: complete, in step with the account, and only where asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

import toy_replicas as toy
from paceline.comm.communicator import Communicator, ComposedCommunicator
from paceline.comm.work import CompletedWork, Work
from paceline.config import RunConfig
from paceline.launch.launcher import train
from paceline.measure import phase_clock as clock_module
from paceline.measure import timeline as timeline_module
from paceline.measure import traffic as traffic_module
from paceline.measure.phase_clock import PhaseClock, PhaseLog, Span
from paceline.measure.trace import WARM_UP_ITERATIONS, Tracer
from paceline.measure.traffic import Traffic
from paceline.records import read_iteration_seconds, read_json
from paceline.strategies import replica as replica_module
from paceline.strategies.options import create_strategy
from paceline.strategies.replica import Replica

Event = dict[str, Any]


class Hand:
    """A clock that the test moves, in whole seconds so that sums are exact.

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
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    for module in (clock_module, traffic_module, timeline_module, replica_module):
        monkeypatch.setattr(module, "perf_counter", hand)
    return hand


def written(tracer: Tracer, folder: Path) -> dict[str, Any]:
    tracer.write(folder / "trace.json", rank=0, node=0, offset_seconds=0.0)
    return read_json(folder / "trace.json")


def of_category(trace: dict[str, Any], category: str) -> list[Event]:
    return [event for event in trace["traceEvents"] if event.get("cat") == category]


def test_the_warm_up_is_passed_over_and_as_many_iterations_traced_as_asked(
    hand: Hand, tmp_path: Path
) -> None:
    clock = PhaseClock()
    tracer = Tracer(clock, Traffic(), iterations=2, done=0, left=100)
    for number in range(20):
        tracer.before_iteration(number)
        clock.begin_step("input")
        hand.move(number + 1)
        clock.end_step("other")
        hand.move(1)
    trace = written(tracer, tmp_path)
    first = WARM_UP_ITERATIONS
    assert trace["iterations"] == [
        {"iteration": first, "ts": 0, "dur": (first + 1) * 1e6},
        {"iteration": first + 1, "ts": (first + 2) * 1e6, "dur": (first + 2) * 1e6},
    ]
    assert trace["began_seconds"] == 100 + sum(n + 2 for n in range(first))


@pytest.mark.parametrize(("left", "first"), [(3, 0), (4, 1), (13, WARM_UP_ITERATIONS)])
def test_a_short_run_is_traced_from_earlier_on(
    hand: Hand, tmp_path: Path, left: int, first: int
) -> None:
    clock = PhaseClock()
    tracer = Tracer(clock, Traffic(), iterations=3, done=0, left=left)
    for number in range(left):
        tracer.before_iteration(number)
        clock.begin_step("input")
        hand.move(1)
        clock.end_step("other")
    numbers = [each["iteration"] for each in written(tracer, tmp_path)["iterations"]]
    assert numbers == [first, first + 1, first + 2]


def test_what_turns_out_to_be_waiting_is_cut_out_of_the_exchange() -> None:
    log = PhaseLog(
        [Span("backward", 0, 4), Span("exchange", 4, 9), Span("update", 9, 10)], [Span("lap", 0, 9)]
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
def test_a_stretch_without_the_phase_changes_nothing(began: float, ended: float) -> None:
    log = PhaseLog([Span("backward", 0, 4), Span("exchange", 4, 9)])
    log.relabel("exchange", "wait", began, ended)
    assert [span.name for span in log.phases if span.name == "wait"] == []
    assert sum(span.ended - span.began for span in log.phases) == 9


def test_transfers_that_overlap_are_on_threads_of_their_own(hand: Hand, tmp_path: Path) -> None:
    clock, traffic = PhaseClock(), Traffic()
    tracer = Tracer(clock, traffic, iterations=1, done=0, left=1)
    tracer.before_iteration(0)
    clock.begin_step("exchange")
    one = traffic.begin("gradients", bytes_sent=5, bytes_received=3, messages=1)
    hand.move(2)
    other = traffic.begin("metrics", bytes_sent=1, messages=1)
    hand.move(2)
    traffic.end(one)
    third = traffic.begin("control")
    hand.move(2)
    traffic.end(other)
    traffic.end(third)
    clock.end_step("other")
    transfers = of_category(written(tracer, tmp_path), "transfer")
    seen = [(e["name"], e["tid"], e["ts"] / 1e6, e["dur"] / 1e6) for e in transfers]
    assert seen == [("gradients", 1, 0, 4), ("metrics", 2, 2, 4), ("control", 1, 4, 2)]
    assert transfers[0]["args"]["bytes"] == 8


class SlowLine(ComposedCommunicator):
    """The first of two workers; every sum takes three seconds, and many travel at once."""

    def __init__(self, hand: Hand, traffic: Traffic) -> None:
        super().__init__(0, 2, 1.0, traffic)
        self._hand = hand

    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        transfer = self.traffic.begin(kind, bytes_sent=tensor.nbytes)
        return self.track_transfer(_Travelling(self._hand, 3.0), transfer)

    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        return CompletedWork()

    def send(self, tensor: Tensor, to: int, kind: str) -> Work:
        raise NotImplementedError

    def recv(self, tensor: Tensor, source: int, kind: str) -> Work:
        raise NotImplementedError

    def dup(self) -> Self:
        return type(self)(self._hand, self.traffic)


class _Travelling(Work):
    def __init__(self, hand: Hand, seconds: float) -> None:
        super().__init__()
        self._hand, self._arrives = hand, hand.now + seconds

    def add_done_callback(self, action: Callable[[float], None]) -> None:
        self._hand.due.append((self._arrives, lambda: action(self._arrives)))

    def _block(self) -> None:
        self._hand.move(max(0.0, self._arrives - self._hand.now))

    def _poll(self) -> bool:
        return self._arrives <= self._hand.now


class SlowInTheMiddle(nn.Module):
    """Its backward pass takes four seconds between the second layer's gradients and the first's."""

    def __init__(self, hand: Hand) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self._hand = hand

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


class _NoticedLate(_Travelling):
    """One that nobody notices to be complete before `wait()`, which then knows since when."""

    def add_done_callback(self, action: Callable[[float], None]) -> None:
        Work.add_done_callback(self, action)

    def _block(self) -> None:
        super()._block()
        self._complete(self._arrives)


class UnwatchedLine(SlowLine):
    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        return _NoticedLate(self._hand, 3.0)


def test_an_exchange_that_is_noticed_late_counts_as_hidden_until_it_ended(hand: Hand) -> None:
    """It ended a second before the backward pass did."""
    replica = replica_on(UnwatchedLine(hand, Traffic()), SlowInTheMiddle(hand))
    strategy = create_strategy("overlap", {"bucket_mib": "0", "first_bucket_mib": "0"})
    strategy.setup(replica)
    strategy.backward(replica.forward(torch.ones(1, 2)).sum())
    strategy.step()
    strategy.finish()
    assert replica.hidden_exchange_seconds == 3


def test_hidden_communication_shows_as_transfers_beside_other_phases(
    hand: Hand, tmp_path: Path
) -> None:
    """Of two sums of three seconds each, one begins four seconds before the backward pass ends."""
    line = SlowLine(hand, Traffic())
    replica = replica_on(line, SlowInTheMiddle(hand))
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


def test_the_phases_of_a_traced_iteration_fill_it_without_gaps(tmp_path: Path) -> None:
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


def test_nothing_is_traced_unless_asked(tmp_path: Path) -> None:
    assert list(short_run(tmp_path).glob("trace-*")) == []
