"""Memory allocation and core pinning of a worker process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.training.process import cores_of, pinned

COUNT_FAULTS = """
import resource, sys
from paceline.training.process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(64 * 2**20)
before = faults()
for _ in range(5):
    bytearray(64 * 2**20)
print(faults() - before)
"""


def faults(how: str) -> int:
    """Of a process that asks for the same 64 MiB five times."""
    command = [sys.executable, "-c", COUNT_FAULTS, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_freed_memory_is_reused_without_page_faults() -> None:
    pages = 5 * 64 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert faults("kept") < pages / 100
    assert faults("plain") > pages / 2, "this C library keeps freed memory by itself"


@pytest.mark.parametrize(
    ("cores", "count", "expected"),
    [
        ([0, 1, 2, 3], 2, [{0, 1}, {2, 3}]),
        ([0, 1, 2, 5, 7], 2, [{0, 1}, {2, 5}]),
        ([4, 6], 2, [{4}, {6}]),
        ([4, 6], 3, [{4}, {6}, {4}]),
        ([3], 1, [{3}]),
    ],
)
def test_cores_are_split_among_workers(
    cores: list[int], count: int, expected: list[set[int]]
) -> None:
    assert [cores_of(cores, number, count) for number in range(count)] == expected


def test_pinning_limits_the_cores_and_is_undone() -> None:
    before = os.sched_getaffinity(0)
    with pinned(0, len(before)):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
