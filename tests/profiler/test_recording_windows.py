"""Collectives that are recorded in windows of steps stand for those of all steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.profiler.collectives.communication import RankCommunication, collectives
from paceline.profiler.collectives.estimated_waits import _last_known
from paceline.profiler.collectives.log import (
    BACKWARD,
    OPERATIONS,
    TRACED,
    CollectiveLog,
    Counts,
    RankCollectives,
    read_logs,
)
from paceline.profiler.collectives.sampling import recorded, sampling_of, skipped_steps
from paceline.profiler.collectives.waiting import separate_waits
from paceline.profiler.post_mortem.end_of_rank import find_last_wait
from paceline.profiler.post_mortem.examination import find_pending, joined_records
from paceline.profiler.recording_windows import is_recorded
from paceline.records import PHASES

PER_STEP = 2
SECONDS = 0.1
"""Of a step: its all-reduce is called when it begins, and its barrier in the middle."""


class Rank:
    """Writes the log of a rank that takes a step every tenth of a second, from time 1."""

    def __init__(
        self, folder: Path, rank: int, late: float = 0.0, group: tuple[int, ...] = (0, 1)
    ) -> None:
        self.log = CollectiveLog(folder, rank)
        described = {"name": "0", "incarnation": 0, "ranks": group, "backend": "gloo"}
        self.log.describe("group", index=0, **described)
        self.steps, self.late = 0, late
        self.duration, self.size = 0.03, 64
        self._exchange: list[float] = []
        """Exposed communication of each step."""
        self.is_paused = False

    def step(self, count: int = 1) -> None:
        for step in range(self.steps, self.steps + count):
            for number, name in enumerate(("all_reduce", "barrier") if not self.is_paused else ()):
                arrival = self._began(step) + number * SECONDS / 2
                # A rank waits for the other if that is late, and then for 10 ms of transfer.
                end = arrival + self.duration
                self._add(name, PER_STEP * step + number, arrival + self.late, end)
        self.steps += count
        self._exchange += [PER_STEP * (self.duration - self.late)] * count

    @property
    def now(self) -> float:
        return self._began(self.steps) - SECONDS / 10

    def _began(self, step: int) -> float:
        return 1.0 + SECONDS * step

    def _add(
        self, name: str, sequence: int, arrival: float, end: float, flags: int = BACKWARD
    ) -> None:
        size = self.size if name == "all_reduce" else 0
        code = OPERATIONS.index(name)
        position = self.log.add(0, code, flags, sequence, size, Counts(), -1, arrival)
        self.log.end(position, end)
        if end:
            self.log.block(position, arrival, end)

    def trace(self, name: str, end: float = 0.0) -> None:
        """The flight recorder has the next call."""
        self._add(name, PER_STEP * self.steps, self._began(self.steps), end, TRACED)
        self.log.describe("calls", calls={"0": PER_STEP * self.steps + 1})

    def pause(self, window: int, more_calls: int = 0) -> None:
        self.is_paused = True
        began = self.steps - window
        exchange = sum(self._exchange[:began])
        self._describe("pause", more_calls, window_updates=began, exchange=exchange)

    def resume(self, more_calls: int = 0) -> None:
        self.is_paused = False
        self._describe("resume", more_calls)

    def _describe(self, event: str, more_calls: int = 0, **values: float) -> None:
        calls = {"0": PER_STEP * self.steps + more_calls}
        if "window_updates" in values:
            values["window_began"] = self._began(int(values["window_updates"])) - SECONDS / 8
        moment = self._began(self.steps) - SECONDS / 8
        self.log.describe(event, updates=self.steps, moment=moment, calls=calls, **values)


def read(folder: Path, *ranks: Rank) -> dict[int, RankCollectives]:
    for rank in ranks:
        rank.log.close()
    (logs,) = read_logs(folder)
    return logs


def count_calls(log: RankCollectives, last: float | None = None) -> dict[str, tuple[float, float]]:
    found = collectives(recorded(log.records), dict.fromkeys(PHASES, 0.0), sampling_of(log, last))
    return {name: (one["count"], one["bytes"]) for name, one in found.items()}


def test_counts_and_bytes_are_those_of_all_steps(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    for _ in range(3):
        rank.step(4)
        rank.pause(4)
        rank.step(12)
        rank.resume()
    rank.step(2)
    (log,) = read(tmp_path, rank).values()
    assert count_calls(log) == {"all_reduce": (50, 50 * 64), "barrier": (50, 0)}
    assert skipped_steps(log, 50) == 36


def test_without_the_count_of_a_group_steps_are_counted(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    rank.step(8)
    rank.pause(4)
    rank.step(12)
    # The group was destroyed.
    rank.log.describe("resume", updates=rank.steps, moment=rank.now, calls={})
    rank.is_paused = False
    rank.step(2)
    (log,) = read(tmp_path, rank).values()
    assert count_calls(log)["all_reduce"] == (22, 22 * 64)


def test_calls_of_the_script_stand_for_themselves(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    for _ in range(3):
        rank.step(4)
        rank.pause(4)
        rank.step(12)
        rank.resume()
        # It ended the pause.
        rank.log.add(0, OPERATIONS.index("broadcast"), 0, 999, 8, Counts(), 0, rank.now)
    (log,) = read(tmp_path, rank).values()
    assert count_calls(log) == {
        "all_reduce": (48, 48 * 64),
        "barrier": (48, 0),
        "broadcast": (3, 24),
    }


def test_collectives_after_the_last_step_do_not_count(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    rank.step(8)
    rank.pause(4)
    rank.step(12)
    # The process ends, after three more collectives.
    rank.resume(more_calls=3)
    (log,) = read(tmp_path, rank).values()
    assert count_calls(log) == {"all_reduce": (20, 20 * 64), "barrier": (20, 0)}


def test_of_a_killed_rank_the_pause_is_estimated_by_its_length(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    rank.step(8)
    rank.pause(4)
    rank.step(12)
    (log,) = read(tmp_path, rank).values()
    assert log.is_paused
    assert count_calls(log, last=1.0 + 20 * SECONDS - SECONDS / 8)["all_reduce"] == (20, 20 * 64)
    assert skipped_steps(log, 20) == 12


def test_a_pause_is_estimated_from_the_window_before_it(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    seconds = 0.0
    # In the second half of the run, messages are larger, and pauses shorter.
    for size, duration, paused in [(64, 0.03, 12), (64, 0.03, 28), (640, 0.04, 4), (640, 0.04, 0)]:
        rank.size, rank.duration = size, duration
        rank.step(4)
        seconds += (4 + paused) * duration
        if paused:
            rank.pause(4)
            rank.step(paused)
            rank.resume()
    (log,) = read(tmp_path, rank).values()
    found = collectives(recorded(log.records), dict.fromkeys(PHASES, 0.0), sampling_of(log))
    assert found["all_reduce"]["count"] == 60
    assert found["all_reduce"]["bytes"] == 48 * 64 + 12 * 640
    assert found["all_reduce"]["seconds"] == pytest.approx(seconds)


def test_collectives_after_a_window_without_any_are_counted(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    rank.step(4)
    rank.pause(4)
    rank.step(12)
    rank.resume()
    # Nothing is synchronized in the next window.
    rank.steps += 4
    rank.pause(4, more_calls=-4 * PER_STEP)
    rank.step(8)
    rank.resume(more_calls=-4 * PER_STEP)
    rank.step(2)
    (log,) = read(tmp_path, rank).values()
    assert count_calls(log)["all_reduce"][0] == 4 + 12 + 8 + 2


def pair(folder: Path, factors: tuple[int, int]) -> dict[int, RankCollectives]:
    """Rank 1 is 20 ms late. Each rank records one of as many windows as its factor says."""
    ranks = Rank(folder, 0), Rank(folder, 1, late=0.02)
    for rank, own_factor in zip(ranks, factors, strict=True):
        rank.step(8)
        for window in range(1, 8):
            if window % own_factor == 0 and rank.is_paused:
                rank.resume()
            elif window % own_factor and not rank.is_paused:
                rank.pause(4)
            rank.step(4)
        if rank.is_paused:
            rank.resume()
    return read(folder, *ranks)


def test_exposed_seconds_add_up_to_the_phases(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    rank.step(4)
    rank.pause(4)
    rank.step(12)
    rank.resume()
    (log,) = read(tmp_path, rank).values()
    phases = dict.fromkeys(PHASES, 0.0) | {"exchange": 0.6, "wait": 0.2}
    found = collectives(recorded(log.records), phases, sampling_of(log))
    # Both operations of a step block the program for as long.
    assert [one["exposed_seconds"] for one in found.values()] == [pytest.approx(0.4)] * 2


@pytest.mark.parametrize("factors", [(2, 2), (2, 4), (4, 2), (1, 4), (4, 1)])
def test_waits_are_known_from_collectives_that_all_ranks_recorded(
    tmp_path: Path, factors: tuple[int, int]
) -> None:
    logs = pair(tmp_path, factors)
    waits = separate_waits(logs)
    assert waits.mismatches == []
    # 36 steps of two collectives, in each of which rank 0 waits for 20 ms.
    assert waits.last_arrivals == {0: 0, 1: 72}
    exposed = 72 * 0.03
    worker: dict[str, Any] = {
        "phases": dict.fromkeys(PHASES, 0.0) | {"exchange": exposed},
        "after_first": {
            "iterations": 35,
            "phases": dict.fromkeys(PHASES, 0.0) | {"exchange": exposed * 35 / 36},
        },
    }
    moments = {"start": 0.5, "first": 1.095, "last": 1.0 + 36 * SECONDS}
    caused = RankCommunication(logs[0], waits).account(worker, moments, logs[0].records)
    assert worker["phases"]["wait"] == pytest.approx(72 * 0.02)
    assert worker["phases"]["exchange"] == pytest.approx(72 * 0.01)
    assert caused == {1: pytest.approx(72 * 0.02)}
    assert worker["after_first"]["phases"]["wait"] == pytest.approx(70 * 0.02)


def test_waits_follow_a_run_whose_ranks_change(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, rank, group=(0, 1, 2)) for rank in range(3)]
    expected = {1: 0.0, 2: 0.0}
    # First rank 1 is late, and then rank 2 for a shorter time, before a longer pause.
    for late, seconds, paused in [(1, 0.02, 4), (2, 0.005, 28), (2, 0.005, 0)]:
        for rank in ranks:
            rank.late = seconds if rank is ranks[late] else 0.0
            rank.step(4)
            if paused:
                rank.pause(4)
                rank.step(paused)
                rank.resume()
        expected[late] += PER_STEP * (4 + paused) * seconds
    logs = read(tmp_path, *ranks)
    phases = dict.fromkeys(PHASES, 0.0) | {"exchange": 44 * PER_STEP * 0.03}
    worker: dict[str, Any] = {
        "phases": phases,
        "after_first": {"iterations": 43, "phases": {**phases}},
    }
    moments = {"start": 0.5, "first": 1.095, "last": 1.0 + 44 * SECONDS}
    waits = separate_waits(logs)
    caused = RankCommunication(logs[0], waits).account(worker, moments, logs[0].records)
    assert caused == {other: pytest.approx(seconds) for other, seconds in expected.items()}
    assert worker["phases"]["wait"] == pytest.approx(sum(expected.values()))
    assert waits.last_arrivals == {0: 0, 1: 8 * PER_STEP, 2: 36 * PER_STEP}


def test_a_rounding_error_is_not_communication_that_ranks_compared() -> None:
    known = _last_known(np.array([1e-12, 0.5, 0.0, 2e-13, 0.25]))
    assert known is not None
    assert known.tolist() == [1, 1, 1, 1, 4]
    assert _last_known(np.array([1e-12])) is None


def test_a_gap_is_not_a_collective_that_a_rank_has_not_called(tmp_path: Path) -> None:
    logs = pair(tmp_path, (2, 4))
    assert find_pending(logs, 1e9) == {}
    assert find_last_wait(logs, 0) is None
    assert len(joined_records(logs, logs[0])) == len(logs[0].records)


def test_a_rank_that_is_killed_in_a_pause_is_missing_in_the_next_collective(tmp_path: Path) -> None:
    ranks = Rank(tmp_path, 0), Rank(tmp_path, 1)
    for rank in ranks:
        rank.step(8)
        rank.pause(4)
        rank.step(3)
    ranks[0].trace("all_reduce")
    logs = read(tmp_path, *ranks)
    pending = find_pending(logs, 1e9)
    assert {rank: (one.sequence, one.missing) for rank, one in pending.items()} == {0: (22, (1,))}
    # What the killed rank called is not known, so nothing that rank 0 recorded is left out.
    assert len(joined_records(logs, logs[0])) == len(logs[0].records)
    wait = find_last_wait(logs, 0)
    assert wait is not None
    assert wait.began == pytest.approx(2.1)


def test_roots_that_the_flight_recorder_does_not_have_are_no_mismatch(tmp_path: Path) -> None:
    ranks = Rank(tmp_path, 0), Rank(tmp_path, 1)
    for rank in ranks:
        rank.step(2)
    ranks[0].pause(2)
    ranks[0].trace("broadcast", end=9.0)
    ranks[1].log.add(0, OPERATIONS.index("broadcast"), 0, 4, 0, Counts(), 1, 1.2)
    assert separate_waits(read(tmp_path, *ranks)).mismatches == []


def test_windows_of_larger_factors_are_recorded_by_smaller_ones() -> None:
    for factor in (2, 4, 8, 16, 32):
        recorded_ones = {index for index in range(16384) if is_recorded(index, factor)}
        assert len(recorded_ones) == pytest.approx(16384 / factor, rel=0.15)
        assert all(is_recorded(index, factor // 2) for index in recorded_ones)
        # What a script does at regular intervals is in some of them, but not in all.
        for period in (2, 4, 8, 16, 32, 64):
            share = sum(index % period == 0 for index in recorded_ones) / len(recorded_ones)
            assert share == pytest.approx(1 / period, rel=0.6)
