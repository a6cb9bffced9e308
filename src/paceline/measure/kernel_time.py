"""Kernel time: how long a GPU ran kernels, from the driver's profiling interface (CUPTI).

Marks of the phase clock do not show it: between two of them, the GPU may run kernels or wait for
the program to launch the next one. CUPTI records when each kernel began and ended. That slows
launches, so it is on only during the iterations of --trace; the share of kernel time in them is
therefore a lower bound of the share in other iterations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.autograd import profiler

KERNEL_TIME_KEYS = ("iterations", "seconds", "window_seconds")
"""Of `kernel_time` in result.json: traced iterations, time with a kernel, and their duration."""

Interval = tuple[int, int]
"""Begin and end, in nanoseconds."""


class KernelProfiler(Protocol):
    """Records the kernels of this process from `start` to `stop`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def kernels(self) -> list[Interval]:
        """Return the recorded kernels, which may overlap; call it after `stop`."""


class CuptiProfiler:
    def __init__(self) -> None:
        # torch.profiler would import the compiler, which takes seconds.
        self._profile: Any = profiler.profile(use_device="cuda", use_cpu=False, use_kineto=True)

    def start(self) -> None:
        self._profile.__enter__()

    def stop(self) -> None:
        self._profile.__exit__(None, None, None)

    def kernels(self) -> list[Interval]:
        return [
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in self._profile.kineto_results.events()
            if event.device_type().name == "CUDA"
            # Copies and fills do not occupy the multiprocessors.
            and not event.name().startswith(("Memcpy", "Memset"))
        ]


class KernelTimer:
    """Measures the kernel time of a window of iterations."""

    def __init__(self, profiler: KernelProfiler) -> None:
        self._profiler = profiler
        self._is_running = False
        self._has_ended = False

    def start(self) -> None:
        """Begin the window; the GPU must be idle."""
        self._profiler.start()
        self._is_running = True

    def stop(self) -> None:
        """End the window; the GPU must be idle. No effect before `start` or the second time."""
        if self._is_running:
            self._profiler.stop()
            self._is_running, self._has_ended = False, True

    def seconds(self) -> float | None:
        """Return the time in which at least one kernel ran.

        None without a complete window, or if no kernel could be recorded.
        """
        kernels = self._profiler.kernels() if self._has_ended else []
        return covered(kernels) / 1e9 if kernels else None


def covered(intervals: Iterable[Interval]) -> int:
    """Return the length of the union of intervals."""
    total = reached = 0
    for began, ended in sorted(intervals):
        total += max(0, ended - max(began, reached))
        reached = max(reached, ended)
    return total


def kernel_timer_for(device: torch.device) -> KernelTimer | None:
    """Return a timer for the kernels of a GPU; None for the CPU."""
    return KernelTimer(CuptiProfiler()) if device.type == "cuda" else None
