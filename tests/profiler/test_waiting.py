"""Waiting is separated from transfer by the arrivals of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.profiler.collectives.communication import RankCommunication
from paceline.profiler.collectives.intervals import Intervals, union
from paceline.profiler.collectives.log import (
    EXPOSED,
    ON_GPU,
    OPERATIONS,
    POLLED,
    CollectiveLog,
    Counts,
    RankCollectives,
    read_logs,
)
from paceline.profiler.collectives.waiting import (
    separate_waits,
)

Call = tuple[str, float, float, float, float]
"""Operation, arrival, end, and from when to when the program was blocked."""


def logs_of(
    folder: Path,
    *ranks: list[Call],
    machines: tuple[str, ...] = (),
    sizes: tuple[int, ...] = (),
    peers: tuple[int, ...] = (),
    flags: int = 0,
) -> dict[int, RankCollectives]:
    """Write and read the logs of ranks of one group."""
    for rank, calls in enumerate(ranks):
        log = CollectiveLog(folder, rank)
        everyone = list(range(len(ranks)))
        log.describe("group", index=0, name="0", incarnation=0, ranks=everyone, backend="gloo")
        for sequence, (operation, arrival, end, blocked_began, blocked_ended) in enumerate(calls):
            size = sizes[rank] if sizes else 64
            peer = peers[rank] if peers else -1
            code = OPERATIONS.index(operation)
            position = log.add(0, code, flags, sequence, size, Counts(), peer, arrival)
            log.end(position, end)
            if blocked_ended > blocked_began:
                log.block(position, blocked_began, blocked_ended)
        log.close()
    (logs,) = read_logs(folder)
    for rank, machine in enumerate(machines):
        logs[rank].machine = machine
    return logs


def test_a_rank_waits_until_the_last_one_arrives(tmp_path: Path) -> None:
    waits = separate_waits(
        logs_of(
            tmp_path,
            [("all_reduce", 10.0, 13.0, 10.0, 13.0)],
            [("all_reduce", 12.5, 13.0, 12.5, 13.0)],
            [("all_reduce", 11.0, 13.0, 11.0, 13.0)],
        )
    )
    assert {rank: one.seconds for rank, one in waits.waited.items()} == {0: 2.5, 1: 0.0, 2: 1.5}
    assert waits.caused_seconds == {0: 0.0, 1: 4.0, 2: 0.0}
    assert waits.last_arrivals == {0: 0, 1: 1, 2: 0}


def test_waiting_counts_only_while_the_program_is_blocked(tmp_path: Path) -> None:
    waits = separate_waits(
        logs_of(
            tmp_path,
            [("all_reduce", 10.0, 13.0, 12.0, 13.0), ("all_reduce", 20.0, 23.0, 0.0, 0.0)],
            [("all_reduce", 12.5, 13.0, 12.5, 13.0), ("all_reduce", 22.0, 23.0, 0.0, 0.0)],
        )
    )
    assert waits.waited[0].seconds == 0.5


def test_buckets_that_are_waited_for_together_count_once(tmp_path: Path) -> None:
    waits = separate_waits(
        logs_of(
            tmp_path,
            [("all_reduce", 10.0, 13.0, 11.0, 13.0), ("all_reduce", 10.5, 13.5, 11.0, 13.5)],
            [("all_reduce", 12.0, 13.0, 12.5, 13.0), ("all_reduce", 12.5, 13.5, 12.5, 13.5)],
        )
    )
    assert waits.waited[0].seconds == 1.5
    assert waits.caused_seconds[1] == 1.5


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("broadcast", [0.0, 2.0, 0.0]), ("reduce", [1.0, 0.0, 0.0])],
)
def test_ranks_wait_for_the_root_or_the_root_for_them(
    tmp_path: Path, operation: str, expected: list[float]
) -> None:
    waits = separate_waits(
        logs_of(
            tmp_path,
            [(operation, 12.0, 14.0, 12.0, 14.0)],
            [(operation, 10.0, 14.0, 10.0, 14.0)],
            [(operation, 13.0, 14.0, 13.0, 14.0)],
            peers=(0, 0, 0),
        )
    )
    assert [waits.waited[rank].seconds for rank in range(3)] == expected


def test_the_receiver_of_a_message_waits_for_the_sender(tmp_path: Path) -> None:
    waits = separate_waits(
        logs_of(
            tmp_path,
            [("send", 12.0, 12.5, 12.0, 12.5)],
            [("recv", 10.0, 12.5, 10.0, 12.5)],
            peers=(1, 0),
        )
    )
    assert [waits.waited[rank].seconds for rank in range(2)] == [0.0, 2.0]


@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
def test_clocks_of_machines_are_aligned_by_their_collectives(tmp_path: Path, offset: float) -> None:
    rng = np.random.default_rng(0)
    first: list[Call] = []
    second: list[Call] = []
    for step in range(200):
        arrivals = step + rng.uniform(0, 0.2, 2)
        ends = arrivals.max() + 0.001 + rng.exponential(0.002, 2)
        for calls, arrival, end, shift in zip(
            (first, second), arrivals, ends, (0.0, offset), strict=True
        ):
            times = (2000 + arrival - shift, 2000 + end - shift)
            calls.append(("all_reduce", *times, *times))
    on_one_clock = [
        sum(max(0.0, b[1] + offset - a[1]) for a, b in zip(first, second, strict=True)),
        sum(max(0.0, a[1] - b[1] - offset) for a, b in zip(first, second, strict=True)),
    ]
    waits = separate_waits(logs_of(tmp_path, first, second, machines=("a", "b")))
    found = [waits.waited[rank].seconds for rank in range(2)]
    # Each collective is off by at most the time of the fastest transfer.
    assert found == pytest.approx(on_one_clock, abs=200 * 0.002)


def test_launches_of_collectives_on_a_gpu_say_nothing_about_clocks(tmp_path: Path) -> None:
    # The second rank launches 50 ms later, and each GPU takes 1 ms.
    launches: list[list[Call]] = [
        [("all_reduce", step + skew, step + skew + 0.001, 0.0, 0.0) for step in range(100)]
        for skew in (1.0, 1.05)
    ]
    logs = logs_of(tmp_path, *launches, machines=("a", "b"), flags=ON_GPU)
    for log in logs.values():
        log.wall_offset = 1000.0
    waits = separate_waits(logs)
    assert waits.offsets.at(np.array([1]), np.array([50.0])).tolist() == [0.0]
    assert waits.last_arrivals == {0: 0, 1: 0}


def test_calls_with_different_sizes_or_operations_are_mismatches(tmp_path: Path) -> None:
    first = [("all_reduce", 1.0, 2.0, 1.0, 2.0), ("barrier", 3.0, 4.0, 3.0, 4.0)]
    second = [("all_reduce", 1.0, 2.0, 1.0, 2.0), ("all_reduce", 3.0, 4.0, 3.0, 4.0)]
    waits = separate_waits(logs_of(tmp_path, first, second))
    assert [each.sequence for each in waits.mismatches] == [1]
    assert waits.mismatches[0].calls == {0: ("barrier", 64, -1), 1: ("all_reduce", 64, -1)}
    sizes = tmp_path / "sizes"
    sizes.mkdir()
    waits = separate_waits(logs_of(sizes, first[:1], second[:1], sizes=(64, 128)))
    assert waits.mismatches[0].calls == {0: ("all_reduce", 64, -1), 1: ("all_reduce", 128, -1)}


def test_a_collective_that_not_all_ranks_reached_is_unfinished(tmp_path: Path) -> None:
    logs = logs_of(tmp_path, [("all_reduce", 1.0, 0.0, 0.0, 0.0)], [])
    waits = separate_waits(logs)
    assert waits.waited[0].seconds == 0
    assert waits.last_arrivals == {0: 0, 1: 0}
    assert logs[0].unfinished["sequence"].tolist() == [0]


def test_waiting_is_divided_among_blocks_of_steps() -> None:
    waited = Intervals(np.array([1.0, 5.0]), np.array([3.0, 6.0]))
    assert waited.between([0.0, 2.0, 4.0, 5.5, 9.0]).tolist() == [1.0, 1.0, 0.5, 0.5]
    assert Intervals(np.zeros(0), np.zeros(0)).between([0.0, 1.0]).tolist() == [0.0]


def test_intervals_that_overlap_are_merged() -> None:
    merged = union(np.array([5.0, 1.0, 2.0]), np.array([6.0, 4.0, 3.0]))
    assert (merged.began.tolist(), merged.ended.tolist()) == ([1.0, 5.0], [4.0, 6.0])


def test_common_parts_of_intervals() -> None:
    some = Intervals(np.array([1.0, 5.0, 8.0]), np.array([3.0, 6.0, 9.0]))
    others = Intervals(np.array([0.0, 2.0, 5.5]), np.array([1.5, 5.0, 8.5]))
    for common in (some.common(others), others.common(some)):
        assert common.began.tolist() == [1.0, 2.0, 5.5, 8.0]
        assert common.ended.tolist() == [1.5, 3.0, 6.0, 8.5]
    nothing = Intervals(np.zeros(0), np.zeros(0))
    assert some.common(nothing).seconds == nothing.common(some).seconds == 0


def test_overlapped_time_is_that_in_which_nothing_is_blocked(tmp_path: Path) -> None:
    calls = [("all_reduce", 1.0, 4.0, 3.0, 4.0), ("all_reduce", 2.0, 5.0, 3.0, 5.0)]
    logs = logs_of(tmp_path, calls)
    phases = {"exchange": 2.0, "wait": 0.0}
    worker: dict[str, Any] = {"phases": {**phases}, "after_first": {"phases": {**phases}}}
    moments = {"start": 0.0, "first": 3.5, "last": 10.0}
    RankCommunication(logs[0], separate_waits(logs)).account(worker, moments, logs[0].records)
    assert worker["hidden_exchange_seconds"] == 2.0
    assert worker["after_first"]["hidden_exchange_seconds"] == 0.0


def test_the_oldest_records_are_overwritten(tmp_path: Path) -> None:
    log = CollectiveLog(tmp_path, 0, max_records=8)
    for sequence in range(20):
        log.add(0, 0, EXPOSED, sequence, 1, Counts(), -1, 1.0 + sequence)
    (logs,) = read_logs(tmp_path)
    assert logs[0].records["sequence"].tolist() == list(range(12, 20))
    log.close()


def test_the_log_grows(tmp_path: Path) -> None:
    log = CollectiveLog(tmp_path, 0)
    for sequence in range(10_000):
        log.end(log.add(0, 0, 0, sequence, 1, Counts(), -1, 1.0 + sequence), 2.0 + sequence)
    (logs,) = read_logs(tmp_path)
    assert logs[0].records["sequence"].tolist() == list(range(10_000))
    assert not len(logs[0].unfinished)
    log.close()


def test_a_restarted_rank_has_a_log_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        log = CollectiveLog(tmp_path, 3)
        log.add(0, 0, 0, 0, 1, Counts(), -1, 1.0)
        log.close()
    assert [list(logs) for logs in read_logs(tmp_path)] == [[3], [3]]


def test_ends_of_overlapped_collectives_are_estimated_from_exact_ones(tmp_path: Path) -> None:
    log = CollectiveLog(tmp_path, 0)
    log.describe("group", index=0, name="0", incarnation=0, ranks=[0], backend="gloo")
    for number, (end, flags) in enumerate([(11.0, 0), (29.0, POLLED), (30.5, POLLED)]):
        position = log.add(0, 0, flags, number, 64, Counts(), -1, 10.0 * (number + 1))
        log.end(position, end)
    log.close()
    (logs,) = read_logs(tmp_path)
    assert logs[0].records["end"].tolist() == [11.0, 21.0, 30.5]


def test_waiting_in_an_evaluation_is_not_waiting_in_steps(tmp_path: Path) -> None:
    early = [("all_reduce", 1.0, 3.0, 1.0, 3.0), ("all_reduce", 5.0, 9.0, 5.0, 9.0)]
    late = [("all_reduce", 2.0, 3.0, 2.0, 3.0), ("all_reduce", 8.0, 9.0, 8.0, 9.0)]
    logs = logs_of(tmp_path, early, late)
    own = RankCommunication(logs[0], separate_waits(logs))
    for interruptions, waited in [([], 4.0), ([[4.0, 7.0]], 2.0), ([[0.0, 0.5], [4.0, 20.0]], 1.0)]:
        phases = {"exchange": 6.0, "wait": 0.0}
        worker: dict[str, Any] = {"phases": {**phases}, "after_first": {"phases": {**phases}}}
        moments = {"start": 0.0, "first": 0.2, "last": 10.0}
        own.account(worker, moments, logs[0].records, interruptions)
        for account in (worker, worker["after_first"]):
            assert account["phases"]["wait"] == pytest.approx(waited)
