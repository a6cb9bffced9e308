"""What the operating system gives a worker's process: memory that it keeps, cores of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from paceline.errors import ConfigError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**30


def keep_freed_memory() -> None:
    """Let this process reuse large blocks instead of giving them back when they are freed.

    Every step allocates the same activations and gradients again; fetched anew from the kernel,
    each of their pages costs a fault. For the whole process and for good, so only where it is ours.
    """
    with contextlib.suppress(OSError, AttributeError):  # not on this C library
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


@contextlib.contextmanager
def pinned(number: int, count: int) -> Iterator[None]:
    """Inside, run on the cores of worker `number` of `count` on this machine only."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(["--pin: this system cannot keep a process on some cores; leave it out"])
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores_of(sorted(allowed), number, count))
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def cores_of(cores: list[int], number: int, count: int) -> set[int]:
    """A worker's part of the cores: neighbours; where workers outnumber cores, they share one."""
    if count > len(cores):
        return {cores[number % len(cores)]}
    each = len(cores) // count
    return set(cores[number * each : (number + 1) * each])
