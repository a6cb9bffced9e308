"""When recording pauses and resumes: at the ends of windows, and before calls of the script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.profiler import FACTOR_VARIABLE
from paceline.profiler.collectives import paused_calls, recording_windows
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
from paceline.profiler.collectives.recorder import CollectiveRecorder, RecordedGroup
from paceline.profiler.collectives.recording_windows import (
    WINDOW_STEPS,
    RecordingWindows,
    is_recorded,
)
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
    """A DDP model with two collectives per step: steps without torch, and without processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group_name, self.called = "0", CALLS_BEFORE
        self.not_seen = 0
        """Collectives that the group counts, but that have no record."""
        self.steps_recorded: list[int] = []
        self.kernels, self.tracker = Kernels(), StepTracker(lambda: None)
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
        self.windows = RecordingWindows(recorder, self.tracker)

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

    def step(self, count: int = 1, backward_seconds: float = 0.004) -> None:
        """Of a recorded step, half of the backward pass is exposed communication."""
        for _ in range(count):
            is_recorded = self.kernels.is_enabled
            for _ in range(PER_STEP):
                self.call()
            exposed = backward_seconds / 2 if is_recorded else 0.0
            phases = self.tracker._clock._seconds
            phases["backward"] += backward_seconds - exposed
            phases["exchange"] += exposed
            self.tracker.exposed_seconds["backward"] = phases["exchange"]
            if is_recorded:
                self.steps_recorded.append(self.tracker.steps)
            self.tracker.steps += 1
            self.windows.end_step()
            self.tracker.events.updates += 1
            if self.tracker.events.updates >= self.tracker.events.window_ends:
                self.tracker.events.on_window()

    def pauses(self) -> list[Pause]:
        (logs,) = read_logs(self.folder)
        return logs[0].pauses

    @property
    def windows_recorded(self) -> set[int]:
        return {step // WINDOW_STEPS for step in self.steps_recorded}


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setenv(FACTOR_VARIABLE, "4")
    monkeypatch.setattr(recording_windows, "PausedCalls", PausedCalls)
    monkeypatch.setattr(recording_windows, "are_traced", lambda *_: True)
    one = Training(tmp_path)
    world = SimpleNamespace(pg_map=[one])
    monkeypatch.setattr(recording_windows, "distributed_c10d", SimpleNamespace(_world=world))
    yield one
    one.windows.close(has_failed=False)
    one.recorder.log.close()


def in_pause(training: Training) -> int:
    """Train until recording pauses; returns the number of steps."""
    for _ in range(64 * WINDOW_STEPS):
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
    (pause,) = training.pauses()
    assert (pause.window_updates, pause.updates) == (began - WINDOW_STEPS, began)
    assert pause.updates_after == training.tracker.steps
    assert pause.calls == {0: PER_STEP * began}
    assert pause.known_calls == {0: PER_STEP * training.tracker.steps}
    assert pause.exchange_seconds == pytest.approx(pause.window_updates * 0.002)
    # `call` checks that records continue with the number that the group has.
    training.step()
    assert training.steps_recorded[-1] == training.tracker.steps - 1


def test_the_share_of_communication_is_that_of_the_window_before(training: Training) -> None:
    in_pause(training)
    training.step(3, backward_seconds=0.006)
    clock = training.tracker.clock
    steps = len(training.steps_recorded)
    for phase in ("backward", "exchange"):
        assert clock.known_seconds[phase] == pytest.approx(steps * 0.002 + 3 * 0.003)


def test_a_call_of_the_script_is_recorded_although_it_is_in_a_pause(training: Training) -> None:
    in_pause(training)
    training.step(5)
    training.call_from_script()
    assert training.is_recording()
    (pause,) = training.pauses()
    assert pause.updates_after == training.tracker.steps
    assert pause.known_calls == {0: training.called - CALLS_BEFORE - 1}
    # The rest of its window and a whole one are recorded.
    resumed = training.tracker.steps
    following = in_pause(training)
    assert following >= (resumed // WINDOW_STEPS + 2) * WINDOW_STEPS
    assert set(range(resumed, following)) <= set(training.steps_recorded)
    assert training.pauses()[-1].window_updates == following - WINDOW_STEPS


def test_a_call_outside_of_a_pause_changes_nothing(training: Training) -> None:
    training.step(WINDOW_STEPS // 2)
    ends = training.tracker.events.window_ends
    training.recorder.before_call()
    assert training.tracker.events.window_ends == ends
    assert training.pauses() == []


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
    assert len(training.pauses()) == 1


def test_a_long_backward_pass_ends_the_pause(training: Training) -> None:
    in_pause(training)
    training.step(backward_seconds=2.0)
    assert training.is_recording()
    resumed = training.tracker.steps
    following = in_pause(training)
    assert following - resumed >= WINDOW_STEPS
    assert training.pauses()[-1].window_updates >= resumed


def test_a_window_with_a_call_of_the_script_is_followed_by_another_one(training: Training) -> None:
    for _ in range(20):
        training.step(WINDOW_STEPS // 2)
        training.call_from_script()
        training.step(WINDOW_STEPS // 2)
    assert training.pauses() == []


def test_recording_never_pauses_if_other_code_issues_collectives(training: Training) -> None:
    training.step(WINDOW_STEPS + 1)
    # C++ code besides that of DDP did.
    training.recorder.other_records += 1
    training.call(flags=0)
    training.step(20 * WINDOW_STEPS)
    assert training.pauses() == []


def test_recording_never_pauses_if_the_group_counts_more_than_the_log(training: Training) -> None:
    training.step(WINDOW_STEPS)
    training.not_seen = 1
    training.step(20 * WINDOW_STEPS)
    assert training.pauses() == []


def test_a_pause_that_lasts_until_the_end_is_completed_in_the_log(training: Training) -> None:
    began = in_pause(training)
    training.step(3)
    training.windows.close(has_failed=False)
    (pause,) = training.pauses()
    assert pause.updates_after == began + 3
    assert pause.known_calls == {0: PER_STEP * (began + 3)}
    paused: Any = training.windows._paused_calls
    assert paused.is_removed
    training.step(8 * WINDOW_STEPS)
    assert len(training.pauses()) == 1


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
