"""Memory that training adds to a worker: its weights, gradients, optimizer state and activations.

What is allocated counts, not what the process keeps for later allocations: on a GPU the tensors
that torch counts, on a CPU what malloc has handed out, plus the worker's part of memory that it
shares with other workers. Dataset, Python and libraries are there before and do not count.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

POINTS = ("forward", "backward", "update")
"""Ends of a part of a step, at which a worker is sampled."""
SAMPLED_STEPS = 3
"""The first has no optimizer state yet; from the second on, steps are alike."""
PROBE_BYTES = 2**22
SMAPS = Path("/proc/self/smaps_rollup")


class WorkerMemory:
    """Create it when the dataset is loaded, before the model is built."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._device = device
        # The model is built in main memory and then moved to the GPU.
        self._before_bytes = 0 if self._is_gpu else allocated_bytes()
        self._shared_before_bytes = 0 if self._is_gpu else shared_bytes()
        self._setup_bytes: int | None = None
        self._points: dict[str, int] = {}
        self._peak_bytes: int | None = None
        self._shared_bytes = 0
        self._steps_left = SAMPLED_STEPS
        self.is_sampling = self._before_bytes is not None
        """Whether `sample` is still due."""

    def setup_done(self) -> None:
        """Call it when model, optimizer and strategy are ready for the first step."""
        allocated = self._allocated_bytes()
        if allocated is not None:
            self._setup_bytes = allocated + self._own_shared_bytes()
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)

    def sample(self, point: str) -> None:
        """Record the memory at one of POINTS; `update` ends a step."""
        allocated = self._allocated_bytes()
        assert allocated is not None
        self._points[point] = max(allocated, self._points.get(point, 0))
        if point == POINTS[-1]:
            self._steps_left -= 1
            self.is_sampling = self._steps_left > 0

    def steps_done(self) -> None:
        """Call it after a step, before an evaluation needs memory; the first call counts."""
        if self._peak_bytes is None and self._points:
            self._shared_bytes = self._own_shared_bytes()
            self._peak_bytes = (
                torch.cuda.max_memory_allocated(self._device)
                if self._is_gpu
                else max(self._points.values()) + self._shared_bytes
            )
            self.is_sampling = False

    def to_dict(self) -> dict[str, int | None]:
        """Return what setup and steps added, in bytes; None for what is not known."""
        points = {
            f"{point}_bytes": self._points[point] + self._shared_bytes
            if point in self._points
            else None
            for point in POINTS
        }
        return {"setup_bytes": self._setup_bytes, **points, "peak_bytes": self._peak_bytes}

    def _allocated_bytes(self) -> int | None:
        if self._is_gpu:
            return torch.cuda.memory_allocated(self._device)
        now = allocated_bytes()
        return None if now is None or self._before_bytes is None else now - self._before_bytes

    def _own_shared_bytes(self) -> int:
        return 0 if self._is_gpu else shared_bytes() - self._shared_before_bytes


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated_bytes() -> int | None:
    """Return what malloc has handed out in this process; None without glibc 2.33 or later.

    Takes 0.1 ms, because it visits the free blocks.
    """
    mallinfo = _mallinfo()
    return None if mallinfo is None else _total_bytes(mallinfo())


def _total_bytes(found: _Mallinfo) -> int:
    """In heaps, plus in blocks of their own."""
    return int(found.uordblks + found.hblkhd)


@cache
def _mallinfo() -> Callable[[], _Mallinfo] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    function.restype = _Mallinfo
    before = _total_bytes(function())
    held = bytearray(PROBE_BYTES)
    # Another allocator, such as a preloaded jemalloc, is not counted.
    return function if _total_bytes(function()) - before > len(held) // 2 else None


def shared_bytes(smaps: Path = SMAPS) -> int:
    """Return this process's part of shared memory; pages are divided among those that use them."""
    try:
        text = smaps.read_text()
    except OSError:
        return 0
    parts = (line.split() for line in text.splitlines())
    return next((1024 * int(words[1]) for words in parts if words[0] == "Pss_Shmem:"), 0)
