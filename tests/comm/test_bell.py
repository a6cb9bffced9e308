"""What workers that share memory learn of one another's end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.comm import in_process
from paceline.comm.shm import futex
from paceline.comm.shm.futex import FutexSignals
from paceline.comm.shm.segment import CACHE_LINE_BYTES, SharedSegment


@contextmanager
def bells_and_peer(spaces_apart: int = 0) -> Iterator[tuple[FutexSignals, subprocess.Popen[bytes]]]:
    """The first of two workers, and a process with the number that the second has given."""
    arena = SharedSegment(in_process.single(), FutexSignals.size_bytes(2))
    own = FutexSignals(arena, 0, rank=0, world_size=2, cores=2)
    lines = arena.integers(0, 2 * CACHE_LINE_BYTES, "I")
    second = CACHE_LINE_BYTES // 4
    with subprocess.Popen(["sleep", "60"]) as process:
        lines[second + futex._PROCESS] = process.pid
        lines[second + futex._SPACE] = lines[futex._SPACE] ^ spaces_apart
        own.watch_over_peers()
        try:
            yield own, process
        finally:
            process.kill()
    own.leave()


def test_a_peer_whose_process_ends_is_gone() -> None:
    with bells_and_peer() as (bells, process):
        assert bells.gone() == ([], [])
        process.kill()
        process.wait()
        assert bells.gone() == ([], [1])


def test_a_number_of_another_container_says_nothing_of_a_process_here() -> None:
    with bells_and_peer(spaces_apart=1) as (bells, process):
        process.kill()
        process.wait()
        assert bells.gone() == ([], [])


def test_leaving_on_another_thread_is_not_the_end_of_a_peer() -> None:
    with bells_and_peer() as (bells, _):
        for descriptor in bells._descriptors:
            os.close(descriptor)
        assert bells.gone() == ([], [])
        bells._descriptors.clear()


def test_a_peer_that_ended_before_it_was_watched_is_gone() -> None:
    arena = SharedSegment(in_process.single(), FutexSignals.size_bytes(2))
    own = FutexSignals(arena, 0, rank=0, world_size=2, cores=2)
    lines = arena.integers(0, 2 * CACHE_LINE_BYTES, "I")
    peer = CACHE_LINE_BYTES // 4
    process = subprocess.Popen(["true"])
    process.wait()  # its number is free again: no process here has it
    lines[peer + futex._PROCESS] = process.pid
    lines[peer + futex._SPACE] = lines[futex._SPACE]
    own.watch_over_peers()
    assert own.gone() == ([], [1])
    own.leave()


def test_every_rank_rings_with_numbers_of_its_own() -> None:
    """A worker that waits for its number to change would miss a call that repeats it."""
    world_size = 1000
    arena = SharedSegment(in_process.single(), FutexSignals.size_bytes(world_size))
    lines = arena.integers(0, world_size * CACHE_LINE_BYTES, "I")
    seen = []
    for rank in range(1, world_size):
        FutexSignals(arena, 0, rank, world_size, cores=2).notify(0)
        seen.append(lines[futex._STAMP])
    assert len(set(seen)) == len(seen)
