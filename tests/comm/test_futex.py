"""Signals between ranks that share memory: detection of exited peers, unique futex words."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.comm import in_process
from paceline.comm.shm import futex
from paceline.comm.shm.futex import FutexSignals
from paceline.comm.shm.segment import CACHE_LINE_BYTES, SharedSegment

LINE = CACHE_LINE_BYTES // 4
"""Integers per cache line, so the offset of rank 1."""


@contextmanager
def signals_and_peer(
    same_namespace: bool = True,
) -> Iterator[tuple[FutexSignals, subprocess.Popen[bytes]]]:
    """Yield the signals of rank 0 and the process whose PID rank 1 has written."""
    segment = SharedSegment(in_process.single(), FutexSignals.size_bytes(2))
    signals = FutexSignals(segment, 0, rank=0, world_size=2, cores=2)
    lines = segment.integers(0, 2 * CACHE_LINE_BYTES, "I")
    with subprocess.Popen(["sleep", "60"]) as process:
        lines[LINE + futex._PID] = process.pid
        lines[LINE + futex._PID_NAMESPACE] = lines[futex._PID_NAMESPACE] ^ (not same_namespace)
        signals.watch_peers()
        try:
            yield signals, process
        finally:
            process.kill()
    signals.disconnect()


def test_peer_whose_process_exits_is_gone() -> None:
    with signals_and_peer() as (signals, process):
        assert signals.disconnected_and_exited_peers() == ([], [])
        process.kill()
        process.wait()
        assert signals.disconnected_and_exited_peers() == ([], [1])


def test_pid_of_another_namespace_is_not_watched() -> None:
    with signals_and_peer(same_namespace=False) as (signals, process):
        process.kill()
        process.wait()
        assert signals.disconnected_and_exited_peers() == ([], [])


def test_descriptors_closed_by_another_thread_do_not_report_an_exit() -> None:
    with signals_and_peer() as (signals, _):
        for descriptor in signals._descriptors:
            os.close(descriptor)
        assert signals.disconnected_and_exited_peers() == ([], [])
        signals._descriptors.clear()


def test_peer_that_exited_before_it_was_watched_is_gone() -> None:
    segment = SharedSegment(in_process.single(), FutexSignals.size_bytes(2))
    signals = FutexSignals(segment, 0, rank=0, world_size=2, cores=2)
    lines = segment.integers(0, 2 * CACHE_LINE_BYTES, "I")
    process = subprocess.Popen(["true"])
    process.wait()  # Its PID is free again.
    lines[LINE + futex._PID] = process.pid
    lines[LINE + futex._PID_NAMESPACE] = lines[futex._PID_NAMESPACE]
    signals.watch_peers()
    assert signals.disconnected_and_exited_peers() == ([], [1])
    signals.disconnect()


def test_every_rank_writes_unique_futex_words() -> None:
    """A rank that waits for its futex word to change would miss a repeated value."""
    world_size = 1000
    segment = SharedSegment(in_process.single(), FutexSignals.size_bytes(world_size))
    lines = segment.integers(0, world_size * CACHE_LINE_BYTES, "I")
    words = []
    for rank in range(1, world_size):
        FutexSignals(segment, 0, rank, world_size, cores=2).notify(0)
        words.append(lines[futex._WORD])
    assert len(set(words)) == len(words)
