"""Threads, CPU time and memory of the profiled process itself."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import torch

from paceline.measure.machine import cores_usable

TASKS = "/proc/self/task"
MEMORY = Path("/proc/self/statm")
NANOSECONDS = 1e-9
SCHEDSTAT_BYTES = 256
"""More than its three numbers take."""


def process_use() -> dict[str, Any]:
    """Totals since the process started; None for what this system does not report."""
    waiting = queue_seconds()
    gpu_bytes = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else None
    return {
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "cores": _cores(),
        "core_set": core_set(),
        "cpu_seconds": round(time.process_time(), 4),
        "queue_seconds": None if waiting is None else round(sum(waiting.values()), 4),
        "main_queue_seconds": None if waiting is None else round(waiting.get(os.getpid(), 0.0), 4),
        "rss_bytes": resident_bytes(),
        "gpu_allocated_bytes": gpu_bytes,
    }


@functools.cache
def _cores() -> int:
    return cores_usable()


@functools.cache
def core_set() -> str | None:
    """The cores that this process may use, as the bits of a hexadecimal number; None if unknown.

    Launchers such as mpirun bind each rank to cores of its own.
    """
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # Not available on this system.
        return None
    return f"{sum(1 << core for core in allowed):x}"


def queue_seconds() -> dict[int, float] | None:
    """How long each thread was ready to run but had no core; None if the kernel does not tell."""
    found: dict[int, float] = {}
    try:
        with os.scandir(TASKS) as tasks:
            threads = [task.name for task in tasks]
        for thread in threads:
            try:
                # A file object for each of many threads would take four times as long.
                file = os.open(f"{TASKS}/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                # The thread has ended, or there is no such file for any of them.
                continue
            try:
                found[int(thread)] = int(os.read(file, SCHEDSTAT_BYTES).split()[1]) * NANOSECONDS
            except ProcessLookupError:
                # It has ended since.
                continue
            finally:
                os.close(file)
    except (OSError, IndexError, ValueError):
        return None
    return found or None


def resident_bytes() -> int | None:
    try:
        return int(MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None
