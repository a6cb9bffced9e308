"""Ends of collectives on a GPU, which are noted after the program launched them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.profiler.collectives import recorder as collectives
from paceline.profiler.collectives.log import ON_GPU, POLLED, CollectiveLog, Counts
from paceline.profiler.collectives.recorder import CollectiveRecorder, Pending
from paceline.profiler.session import Session
from paceline.profiler.tracking.step_tracker import StepTracker


class Work:
    """One of NCCL that takes 2 ms."""

    has_ended = False

    def is_completed(self) -> bool:
        return self.has_ended

    def _get_duration(self) -> float:
        return 2.0


def launch(recorder: CollectiveRecorder, sequence: int) -> tuple[Work, int]:
    assert recorder.log is not None
    work = Work()
    position = recorder.log.add(0, 0, ON_GPU, sequence, 64, Counts(), -1, 1.0 + sequence)
    recorder._poll_later(Pending(work, position, 0, is_on_gpu=True))
    return work, position


@pytest.fixture
def recorder(tmp_path: Path) -> Any:
    recorder = CollectiveRecorder(StepTracker(lambda: None), tmp_path)
    recorder.log = CollectiveLog(tmp_path, 0)
    yield recorder
    recorder.remove()


def test_an_end_is_noted_by_the_end_of_a_step(
    recorder: CollectiveRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recorder.log is not None
    session = Session(tmp_path)
    session._collectives = recorder
    monkeypatch.setattr(session.log, "step", lambda tracker: None)
    work, position = launch(recorder, 0)
    session._end_step()
    assert recorder.log.ended(position) == 0
    work.has_ended = True
    session._end_step()
    assert recorder.log.ended(position) == pytest.approx(1.002)


def test_an_operation_that_is_no_longer_polled_has_an_end(
    recorder: CollectiveRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "MAX_PENDING", 4)
    assert recorder.log is not None
    log = recorder.log
    positions = [launch(recorder, sequence)[1] for sequence in range(6)]
    assert [log.ended(one) > 0 for one in positions] == [True] * 2 + [False] * 4
    assert [log.has_flag(one, POLLED) for one in positions] == [True] * 2 + [False] * 4
