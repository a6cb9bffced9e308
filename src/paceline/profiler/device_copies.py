"""Copies of batches from the host to a GPU, and the lines of the script that make them.

A copy from pageable memory, or one without `non_blocking`, blocks the program until the GPU has
done all work before it. Copies are counted from the first step of an optimizer on a GPU on: before
it, scripts move their model.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from paceline.profiler.call_sites import describe_line, script_line
from paceline.profiler.event_queue import Guard
from paceline.profiler.gpu_times import GpuInterval
from paceline.profiler.hooks import Hooks
from paceline.profiler.step_tracker import StepTracker

EXACT_FIRST, EXACT_SHARE = 64, 8
"""The GPU times the first copies of a line, and one in eight after them."""
MAX_PENDING = 64
NOT_TRAINING = frozenset(("evaluate", "checkpoint"))
_OF_SUBCLASS = Tensor.__torch_function__.__func__.__code__  # type: ignore[attr-defined]
"""Calls the method of a subclass once more."""


@dataclass(slots=True)
class CopySite:
    """Copies by one line."""

    call: str
    line: tuple[str, int]
    count: int = 0
    seconds: float = 0.0
    """Of the program."""
    bytes: int = 0
    pageable_bytes: int = 0
    blocking_bytes: int = 0
    """Of copies that the program waits for by request: without `non_blocking`."""
    steps: int = 0
    last_step: int = -1
    is_pageable: bool = False
    timed_bytes: int = 0
    timed_seconds: float = 0.0
    """Of the GPU."""

    @property
    def is_due(self) -> bool:
        """Whether the next copy is timed by the GPU."""
        return self.count < EXACT_FIRST or self.count % EXACT_SHARE == 0

    def add(self, size_bytes: int, seconds: float, step: int, is_blocking: bool) -> None:
        self.count += 1
        self.seconds += seconds
        self.bytes += size_bytes
        self.pageable_bytes += size_bytes * self.is_pageable
        self.blocking_bytes += size_bytes * is_blocking
        if self.last_step != step:
            self.last_step = step
            self.steps += 1

    def to_record(self) -> dict[str, Any]:
        per_byte = self.timed_seconds / self.timed_bytes if self.timed_bytes else 0.0
        return {
            "call": self.call,
            **describe_line(*self.line),
            "count": self.count,
            "steps": self.steps,
            "bytes": self.bytes,
            "pageable_bytes": self.pageable_bytes,
            "blocking_bytes": self.blocking_bytes,
            "seconds": round(self.seconds, 6),
            "gpu_seconds": round(per_byte * self.bytes, 6),
        }


class DeviceCopies:
    """Counts copies from `install` until the hooks are removed."""

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._sites: dict[tuple[CodeType, int], CopySite] = {}
        """By instruction, since looking up the number of a line takes longer."""
        self._lines: dict[tuple[str, tuple[str, int]], CopySite] = {}
        self._pending: deque[tuple[CopySite, int, GpuInterval]] = deque(maxlen=MAX_PENDING)

    def install(self, hooks: Hooks, guard: Guard) -> None:
        begin, end = guard(self._begin), guard(self._end)

        def make_copy(original: Any) -> Any:
            """`to` or `cuda`, whose result is another tensor."""

            def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                if tensor.is_cuda or is_dynamo_compiling():
                    return original(tensor, *args, **kwargs)
                began = begin(sys._getframe(1), original.__name__)
                result = original(tensor, *args, **kwargs)
                if began is not None and result.is_cuda:
                    end(began, tensor, args, kwargs)
                return result

            return copy

        def make_copy_into(original: Any) -> Any:
            def copy_(tensor: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
                is_other = not tensor.is_cuda or not isinstance(source, Tensor) or source.is_cuda
                if is_other or is_dynamo_compiling():
                    return original(tensor, source, *args, **kwargs)
                began = begin(sys._getframe(1), original.__name__)
                result = original(tensor, source, *args, **kwargs)
                if began is not None:
                    end(began, source, args, kwargs)
                return result

            return copy_

        hooks.replace(Tensor, "to", make_copy)
        hooks.replace(Tensor, "cuda", make_copy)
        hooks.replace(Tensor, "copy_", make_copy_into)

    def _begin(
        self, frame: FrameType, name: str
    ) -> tuple[CopySite, GpuInterval | None, float] | None:
        if frame.f_code is _OF_SUBCLASS or self._tracker.clock.phase in NOT_TRAINING:
            return None
        if not self._tracker.is_in_thread():
            return None
        key = frame.f_code, frame.f_lasti
        site = self._sites.get(key)
        if site is None:
            call, line = f"Tensor.{name}", script_line(frame)
            site = self._lines.setdefault((call, line), CopySite(call, line))
            self._sites[key] = site
        return site, GpuInterval() if site.is_due else None, perf_counter()

    def _end(
        self,
        began: tuple[CopySite, GpuInterval | None, float],
        source: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        site, interval, moment = began
        seconds, tracker = perf_counter() - moment, self._tracker
        if interval is not None:
            interval.end()
            site.is_pageable = not source.is_pinned()
            self._pending.append((site, source.nbytes, interval))
        is_blocking = not (kwargs.get("non_blocking") or any(each is True for each in args))
        site.add(source.nbytes, seconds, tracker.steps, is_blocking)
        tracker.timed_calls += 1

    def _settle(self) -> None:
        while self._pending and self._pending[0][2].is_completed():
            site, size_bytes, interval = self._pending.popleft()
            site.timed_bytes += size_bytes
            site.timed_seconds += interval.seconds()

    def records(self) -> dict[str, Any]:
        """Totals since the start; nothing if the script makes no copies."""
        self._settle()
        found = [site.to_record() for site in self._lines.values() if site.count]
        return {"copies": found} if found else {}
