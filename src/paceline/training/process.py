"""Operating system settings of a worker process: memory allocation and core pinning.

This module does not import torch, because it runs before torch is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from paceline.errors import ConfigError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**30


def keep_freed_memory() -> None:
    """Make malloc reuse large freed blocks instead of returning them to the kernel.

    Every step allocates the same activations and gradients, and each page that comes from the
    kernel costs a page fault. The setting is permanent, so only use it in processes of paceline.
    """
    with contextlib.suppress(OSError, AttributeError):  # not on this C library
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


@contextlib.contextmanager
def pinned(number: int, count: int) -> Iterator[None]:
    """Run a block only on the cores of worker `number` of `count` on this machine."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(["--pin: this system does not support CPU affinity; remove it"])
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores_of(sorted(allowed), number, count))
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def cores_of(cores: list[int], number: int, count: int) -> set[int]:
    """Return adjacent cores for a worker; workers share cores if there are more than cores."""
    if count > len(cores):
        return {cores[number % len(cores)]}
    each = len(cores) // count
    return set(cores[number * each : (number + 1) * each])
