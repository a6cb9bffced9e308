"""When recording pauses and resumes: at the ends of windows, and before calls of the script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.optim import SGD, Optimizer

from paceline.profiler import FACTOR_VARIABLE
from paceline.profiler.collectives import paused_calls, pauses
from paceline.profiler.collectives.flight_recorder import TracedCall, number_of
from paceline.profiler.collectives.log import (
    BACKWARD,
    POLLED,
    TRACED,
    CollectiveLog,
    Counts,
    Pause,
    read_logs,
)
from paceline.profiler.collectives.pauses import CollectivePauses
from paceline.profiler.collectives.recorder import CollectiveRecorder, RecordedGroup
from paceline.profiler.overhead import HookCosts
from paceline.profiler.recording_windows import (
    WINDOW_STEPS,
    RecordingWindows,
    Totals,
    is_recorded,
)
from paceline.profiler.sleep_time import SleepTime
from paceline.profiler.tracking.paused_steps import StepPhases
from paceline.profiler.tracking.step_tracker import StepTracker

CALLS_BEFORE = 5
"""That the process group counted before its first record."""
PER_STEP = 2


class Kernels:
    """The collectives that are recorded are those that are called while it is enabled."""

    is_enabled = True

    def enable(self) -> None:
        self.is_enabled = True

    def disable(self) -> None:
        self.is_enabled = False


class PausedCalls:
    def __init__(self, *_: Any) -> None:
        self.is_paused = self.is_removed = False

    def begin(self, *_: Any) -> None:
        self.is_paused = True

    def end(self) -> None:
        self.is_paused = False

    def remove(self, **_: Any) -> None:
        self.is_removed = True


class Training:
    """A DDP model with two collectives per step: steps without torch, and without processes.

    Of a recorded backward pass, half is exposed communication. A step has 1 ms of forward pass
    and 1 ms of update besides.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group_name, self.called = "0", CALLS_BEFORE
        self.not_seen = 0
        """Collectives that the group counts, but that have no record."""
        self.steps_recorded: list[int] = []
        self.kernels, self.tracker = Kernels(), StepTracker(lambda: None)
        self.model = nn.Linear(1, 1)
        self.optimizer: ref[Optimizer] = ref(SGD(self.model.parameters(), lr=0.1))
        self.now = self.tracker.clock.started
        self.spend(0.0)
        self.group = RecordedGroup(0, 0, 2, calls_before=CALLS_BEFORE)
        recorder: Any = SimpleNamespace(
            log=CollectiveLog(folder, 0),
            groups={"0": self.group},
            kernels=self.kernels,
            guard=lambda function: function,
            end_step=lambda: None,
            before_call=lambda: None,
            can_pause=True,
            calls_of_other_threads=0,
            script_calls=0,
            other_records=0,
        )
        self.recorder = recorder
        described = {"name": "0", "incarnation": 0, "ranks": [0, 1], "backend": "gloo"}
        self.recorder.log.describe("group", index=0, **described)
        self.pauses = CollectivePauses(recorder, self.tracker)
        self.windows = RecordingWindows(
            self.tracker, HookCosts(), lambda function: function, self.pauses
        )
        recorder.before_call = self.windows.before_call

    def is_recording(self) -> bool:
        return self.kernels.is_enabled

    def _get_sequence_number_for_group(self) -> int:
        return self.called + self.not_seen

    def call(self, flags: int = BACKWARD) -> None:
        self.called += 1
        if self.kernels.is_enabled:
            sequence = next(self.group.sequence)
            assert sequence == self.called - CALLS_BEFORE - 1
            self.recorder.log.add(0, 0, flags, sequence, 64, Counts(), -1, 1.0 + self.called)

    def call_from_script(self) -> None:
        self.recorder.before_call()
        self.recorder.script_calls += 1
        self.recorder.other_records += 1
        self.call(flags=0)

    def spend(self, seconds: float) -> None:
        self.now += seconds
        self.tracker.events.advance(self.now)

    def step(
        self, count: int = 1, backward_seconds: float = 0.004, input_seconds: float = 0.0
    ) -> None:
        for _ in range(count):
            for _ in range(PER_STEP):
                self.call()
            if self.is_recording():
                self.steps_recorded.append(self.tracker.steps)
                self._recorded_step(backward_seconds, input_seconds)
                self.tracker.end_update(self.optimizer)
            else:
                self.spend(0.002 + backward_seconds + input_seconds)
                paused = self.tracker.paused
                paused.backward_seconds += backward_seconds
                paused.input_seconds += input_seconds
                self.tracker.end_paused_step(paused.input_seconds, paused.backward_seconds)
            events = self.tracker.events
            events.updates += 1
            self.windows.settle()
            if events.updates >= events.window_ends:
                events.on_window()

    def _recorded_step(self, backward_seconds: float, input_seconds: float) -> None:
        tracker = self.tracker
        tracker.begin_input(tracker._iterator, True)
        self.spend(input_seconds)
        tracker.end_input(tracker._iterator, 4)
        tracker.call_model(ref(self.model), True, True)
        self.spend(0.001)
        tracker.begin_backward(True, None, self.now)
        began = self.now
        self.spend(backward_seconds)
        tracker.end_backward()
        tracker.clock.expose("backward", self.now - backward_seconds / 2, self.now)
        tracker.note_exposed("backward", self.now - began - backward_seconds / 2)
        tracker.begin_update(self.optimizer, tracker.events.thread)
        self.spend(0.001)

    def logged_pauses(self) -> list[Pause]:
        (logs,) = read_logs(self.folder)
        return logs[0].pauses

    @property
    def windows_recorded(self) -> set[int]:
        return {step // WINDOW_STEPS for step in self.steps_recorded}


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setenv(FACTOR_VARIABLE, "4")
    monkeypatch.setattr(pauses, "PausedCalls", PausedCalls)
    monkeypatch.setattr(pauses, "are_traced", lambda *_: True)
    one = Training(tmp_path)
    world = SimpleNamespace(pg_map=[one])
    monkeypatch.setattr(pauses, "distributed_c10d", SimpleNamespace(_world=world))
    yield one
    one.windows.close(has_failed=False)
    one.recorder.log.close()


def in_pause(training: Training) -> int:
    """Train until recording pauses; returns the number of steps."""
    for _ in range(64 * WINDOW_STEPS):
        assert training.is_recording() is (not training.tracker.paused.thread)
        if not training.is_recording():
            return training.tracker.steps
        training.step()
    raise AssertionError("no pause")


def test_windows_are_recorded_as_a_whole_or_not_at_all(training: Training) -> None:
    count = 40
    training.step(count * WINDOW_STEPS)
    # The first window has no beginning that is known, and the second one decides.
    expected = {0, 1, *(index for index in range(2, count) if is_recorded(index, 4))}
    assert training.windows_recorded == expected
    assert len(training.steps_recorded) == len(expected) * WINDOW_STEPS
    assert len(expected) < count / 2


def test_a_pause_is_described_by_what_the_process_group_counts(training: Training) -> None:
    began = in_pause(training)
    while not training.is_recording():
        training.step()
    (pause,) = training.logged_pauses()
    assert (pause.window_updates, pause.updates) == (began - WINDOW_STEPS, began)
    assert pause.updates_after == training.tracker.steps
    assert pause.calls == {0: PER_STEP * began}
    assert pause.known_calls == {0: PER_STEP * training.tracker.steps}
    assert pause.exchange_seconds == pytest.approx(pause.window_updates * 0.002)
    # `call` checks that records continue with the number that the group has.
    training.step()
    assert training.steps_recorded[-1] == training.tracker.steps - 1


def test_steps_in_a_pause_are_divided_like_the_window_before(training: Training) -> None:
    in_pause(training)
    clock, steps = training.tracker.clock, len(training.steps_recorded)
    training.step(3, backward_seconds=0.006, input_seconds=0.01)
    # Input and backward passes are measured, and communication is half of the latter.
    expected = {
        "input": 3 * 0.01,
        "forward": (steps + 3) * 0.001,
        "backward": steps * 0.002 + 3 * 0.003,
        "exchange": steps * 0.002 + 3 * 0.003,
        "update": (steps + 3) * 0.001,
        "wait": 0.0,
        "other": 0.0,
    }
    found = {name: clock.known_seconds[name] for name in expected}
    assert found == pytest.approx(expected, abs=1e-9)
    assert sum(clock.known_seconds.values()) == pytest.approx(training.now - clock.started)
    assert clock.step_seconds[-1] == pytest.approx(0.018)


class Slept(SleepTime):
    """Of a thread that slept for a time that is given."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._slept = seconds

    def refresh(self) -> None:
        pass

    def _since_last(self) -> float:
        return 0.0


@pytest.mark.parametrize("slept", [0.0, 0.7, 5.0])
def test_a_long_backward_pass_is_waiting_as_far_as_the_thread_slept(
    training: Training, slept: float
) -> None:
    in_pause(training)
    clock = training.tracker.clock
    before = dict(clock.known_seconds)
    training.windows._sleep_time = Slept(slept)
    training.step(backward_seconds=2.0)
    # The other rank saves a checkpoint, or this one computes for longer than the usual 4 ms. Of
    # these, the thread sleeps for 2 ms.
    waited = min(max(0, slept - 0.002), 2.0 - 0.004)
    spent = {name: clock.known_seconds[name] - before[name] for name in before}
    assert spent["wait"] == pytest.approx(waited)
    for phase in ("exchange", "backward"):
        assert spent[phase] == pytest.approx((2.0 - waited) / 2)
    assert training.is_recording()


def test_sleep_that_is_usual_is_no_sign_of_waiting(training: Training) -> None:
    in_pause(training)
    clock, tracker = training.tracker.clock, training.tracker
    for seconds in (0.004, 0.004, 2.0):
        training.spend(0.002 + seconds)
        tracker.paused.backward_seconds += seconds
        tracker.events.updates += 1
        tracker.end_update(training.optimizer)
    # In each of the three steps, the thread slept for 2 ms as in those before.
    training.windows._sleep_time = Slept(0.006)
    training.windows.settle()
    assert clock.known_seconds["wait"] == pytest.approx(0, abs=1e-9)


def test_a_long_input_is_not_taken_for_waiting(training: Training) -> None:
    in_pause(training)
    clock = training.tracker.clock
    training.windows._sleep_time = Slept(5.0)
    training.step(input_seconds=2.0)
    assert clock.known_seconds["wait"] == pytest.approx(0, abs=1e-9)
    assert clock.known_seconds["input"] == pytest.approx(2.0)
    assert training.is_recording()


def test_a_call_of_the_script_is_recorded_although_it_is_in_a_pause(training: Training) -> None:
    in_pause(training)
    training.step(5)
    training.call_from_script()
    assert training.is_recording()
    (pause,) = training.logged_pauses()
    assert pause.updates_after == training.tracker.steps
    assert pause.known_calls == {0: training.called - CALLS_BEFORE - 1}
    # The rest of its window and a whole one are recorded.
    resumed = training.tracker.steps
    following = in_pause(training)
    assert following >= (resumed // WINDOW_STEPS + 2) * WINDOW_STEPS
    assert set(range(resumed, following)) <= set(training.steps_recorded)
    assert training.logged_pauses()[-1].window_updates == following - WINDOW_STEPS


def test_a_call_outside_of_a_pause_changes_nothing(training: Training) -> None:
    training.step(WINDOW_STEPS // 2)
    ends = training.tracker.events.window_ends
    training.recorder.before_call()
    assert training.tracker.events.window_ends == ends
    assert training.logged_pauses() == []


def test_a_call_of_another_thread_ends_pauses_with_the_next_step(training: Training) -> None:
    in_pause(training)
    thread = Thread(target=training.recorder.before_call)
    thread.start()
    thread.join()
    # That thread must not enable kernels, which the training thread may be in.
    assert not training.is_recording()
    training.step()
    assert training.is_recording()
    training.step(20 * WINDOW_STEPS)
    assert training.is_recording()
    assert len(training.logged_pauses()) == 1


def test_a_long_backward_pass_ends_the_pause(training: Training) -> None:
    in_pause(training)
    training.step(backward_seconds=2.0)
    assert training.is_recording()
    resumed = training.tracker.steps
    following = in_pause(training)
    assert following - resumed >= WINDOW_STEPS
    assert training.logged_pauses()[-1].window_updates >= resumed


def test_a_window_with_a_call_of_the_script_is_followed_by_another_one(training: Training) -> None:
    for _ in range(20):
        training.step(WINDOW_STEPS // 2)
        training.call_from_script()
        training.step(WINDOW_STEPS // 2)
    assert training.logged_pauses() == []


def test_recording_never_pauses_if_other_code_issues_collectives(training: Training) -> None:
    training.step(WINDOW_STEPS + 1)
    # C++ code besides that of DDP did.
    training.recorder.other_records += 1
    training.call(flags=0)
    training.step(20 * WINDOW_STEPS)
    assert training.logged_pauses() == []


def test_recording_never_pauses_if_the_group_counts_more_than_the_log(training: Training) -> None:
    training.step(WINDOW_STEPS)
    training.not_seen = 1
    training.step(20 * WINDOW_STEPS)
    assert training.logged_pauses() == []


def test_a_pause_that_lasts_until_the_end_is_completed_in_the_log(training: Training) -> None:
    began = in_pause(training)
    training.step(3)
    training.windows.close(has_failed=False)
    (pause,) = training.logged_pauses()
    assert pause.updates_after == began + 3
    assert pause.known_calls == {0: PER_STEP * (began + 3)}
    paused: Any = training.pauses._paused_calls
    assert paused.is_removed
    training.step(8 * WINDOW_STEPS)
    assert len(training.logged_pauses()) == 1


def test_what_happens_in_most_steps_is_recorded_for_longer_each_time(training: Training) -> None:
    interrupted = []
    for _ in range(4):
        began = in_pause(training)
        interrupted.append(began)
        training.step()
        training.tracker.paused.interrupt()
        assert training.is_recording()
    first, second, third, fourth = interrupted
    assert second - first < third - second < fourth - third


def test_what_the_script_does_between_two_steps_stays_other(training: Training) -> None:
    in_pause(training)
    clock = training.tracker.clock
    before = dict(clock.known_seconds)
    training.spend(0.5)
    training.step()
    spent = {name: clock.known_seconds[name] - before[name] for name in before}
    assert spent["other"] == pytest.approx(0.5)
    assert spent["wait"] == 0
    for phase in ("forward", "update"):
        assert spent[phase] == pytest.approx(0.001)


def test_an_unfinished_step_stays_other(training: Training) -> None:
    in_pause(training)
    clock = training.tracker.clock
    before = dict(clock.known_seconds)
    training.step()
    training.spend(0.3)
    training.windows.close(has_failed=False)
    spent = {name: clock.known_seconds[name] - before[name] for name in before}
    assert spent["other"] == pytest.approx(0.3)
    assert spent["forward"] == pytest.approx(0.001)


def test_what_the_script_does_once_in_a_window_is_not_expected_in_a_pause(
    training: Training,
) -> None:
    training.step(WINDOW_STEPS + 3)
    training.spend(0.5)
    in_pause(training)
    clock = training.tracker.clock
    before = dict(clock.known_seconds)
    training.step()
    assert clock.known_seconds["other"] - before["other"] == pytest.approx(0, abs=1e-9)
    assert clock.known_seconds["forward"] - before["forward"] == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("share", "before", "expected"),
    [(0.002, 1, 1), (0.004, 1, 4), (0.045, 1, 32), (0.5, 1, 64), (0.09, 4, 8), (0.001, 8, 4)],
)
def test_the_cost_of_recording_decides_how_many_windows_are_recorded(
    training: Training,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    before: int,
    expected: int,
) -> None:
    windows = training.windows
    windows._forced, windows._factor = None, before
    windows._window = Totals(0, 0, 10.0, 1.0, 0, StepPhases({}, 0.0), None)
    now = Totals(16, 16, 12.0, 1.0 + 2 * share, 0, StepPhases({}, 0.0), None)
    for can_pause, factor in ((True, expected), (False, 1)):
        monkeypatch.setattr(windows, "_can_pause", lambda *_, can_pause=can_pause: can_pause)
        assert windows._next_factor(now) == factor


def test_the_flight_recorder_is_read_only_if_something_can_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[TracedCall] = []
    reads = []

    def read_calls(after: Mapping[str, int]) -> list[TracedCall]:
        reads.append(after)
        return calls

    monkeypatch.setattr(paused_calls, "read_calls", read_calls)
    numbers = {0: 8}
    log = CollectiveLog(tmp_path, 0)
    paused = paused_calls.PausedCalls(
        log, StepTracker(lambda: None), lambda function: function, lambda: dict(numbers)
    )
    # The thread of its own does not take this for a stall.
    paused.begin({"0": RecordedGroup(0, 0, 2, calls_before=CALLS_BEFORE)}, step_seconds=1e6)
    try:
        paused._add_calls()
        assert not reads
        numbers[0] += 1
        calls.append(TracedCall("0", CALLS_BEFORE + 9, 0, 64, 1.0, has_ended=False))
        for _ in range(2):
            # It may end at any time.
            paused._add_calls()
        assert len(reads) == 2
        calls[0] = calls[0]._replace(has_ended=True)
        for _ in range(3):
            paused._add_calls()
        assert len(reads) == 3
        (record,) = log.read()
        assert (record["sequence"], record["flags"]) == (8, TRACED | POLLED)
        assert record["end"] > 0
    finally:
        paused.remove()
        log.close()


def test_a_group_is_destroyed_after_recording_resumed(tmp_path: Path) -> None:
    recorder = CollectiveRecorder(StepTracker(lambda: None), tmp_path)
    store = dist.HashStore()  # type: ignore[attr-defined]  # not in the stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    numbers = []
    try:
        recorder.install()
        dist.all_reduce(torch.ones(1))
        recorder.before_call = lambda: numbers.append(
            [number_of(group) for group in distributed_c10d._world.pg_map]
        )
    finally:
        dist.destroy_process_group()
        recorder.remove()
    assert numbers == [[1]]
