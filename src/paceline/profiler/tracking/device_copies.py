"""Copies of batches from the host to a GPU, and the lines of the script that make them.

A copy from pageable memory, or one without `non_blocking`, blocks the program until the GPU has
done all work before it. Copies are counted from the first step of an optimizer on a GPU on: before
it, scripts move their model.

Methods of Tensor are replaced for it. torch.compile reads them, and guards compiled code by their
identity: in a process that compiles, they are the original ones, and no copies are counted.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from paceline.profiler.tracking.call_sites import ScriptLine, script_line
from paceline.profiler.tracking.event_queue import Guard
from paceline.profiler.tracking.gpu_times import GpuInterval
from paceline.profiler.tracking.hooks import Hooks
from paceline.profiler.tracking.step_tracker import StepTracker

EXACT_FIRST, EXACT_SHARE = 64, 8
"""The GPU times the first copies of a line, and one in eight after them."""
MAX_PENDING = 64
NOT_TRAINING = frozenset(("evaluate", "checkpoint"))
_OF_SUBCLASS = Tensor.__torch_function__.__func__.__code__  # type: ignore[attr-defined]
"""Calls the method of a subclass once more."""
_dispatch_modes = torch._C._len_torch_dispatch_stack
"""The number of modes: in some, such as that of torch.export, tensors have no data."""


@dataclass(slots=True)
class CopySite:
    """Copies by one line."""

    call: str
    line: ScriptLine
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
            **self.line.to_record(),
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
        self._lines: dict[tuple[str, ScriptLine], CopySite] = {}
        self._first_step: int | None = None
        """The first one of which all copies are counted; None: none are."""
        self._pending: deque[tuple[CopySite, int, GpuInterval]] = deque(maxlen=MAX_PENDING)

    def install(self, hooks: Hooks, guard: Guard) -> None:
        """Raises an error, and replaces nothing, if torch.compile lacks what this uses."""
        # Importing it takes long, but optimizers of torch do so in their first step.
        from torch._dynamo import callback, convert_frame, trace_rules

        if convert_frame.FRAME_COUNTER:
            return
        # It is built once, and by the first function that is compiled.
        trace_rules.get_tensor_method()
        methods = Hooks()
        hooks.on_remove(methods.remove)

        def make_start(original: Any) -> Any:
            def run_start_callbacks(handler: Any, *args: Any) -> None:
                methods.remove()
                self._lines.clear()
                self._sites.clear()
                self._pending.clear()
                original(handler, *args)

            return run_start_callbacks

        hooks.replace(callback.CompilationCallbackHandler, "run_start_callbacks", make_start)
        self._replace_methods(methods, guard)
        self._first_step = self._tracker.steps + 1

    def _replace_methods(self, methods: Hooks, guard: Guard) -> None:
        begin, end, modes = guard(self._begin), guard(self._end), _dispatch_modes

        def make_copy(original: Any) -> Any:
            """`to` or `cuda`, whose result is another tensor."""
            find_target = _target_of_cuda if original.__name__ == "cuda" else _target_of_to

            def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                target = None if tensor.is_cuda or modes() else find_target(args, kwargs)
                if target is None:
                    return original(tensor, *args, **kwargs)
                began = begin(sys._getframe(1), original.__name__, target)
                result = original(tensor, *args, **kwargs)
                if began is not None:
                    end(began, tensor, args, kwargs)
                return result

            return copy

        def make_copy_into(original: Any) -> Any:
            def copy_(tensor: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
                is_other = not tensor.is_cuda or not isinstance(source, Tensor) or source.is_cuda
                if is_other or modes():
                    return original(tensor, source, *args, **kwargs)
                began = begin(sys._getframe(1), original.__name__, tensor.device)
                result = original(tensor, source, *args, **kwargs)
                if began is not None:
                    end(began, source, args, kwargs)
                return result

            return copy_

        methods.replace(Tensor, "to", make_copy)
        methods.replace(Tensor, "cuda", make_copy)
        methods.replace(Tensor, "copy_", make_copy_into)

    def _begin(
        self, frame: FrameType, name: str, device: Any
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
        return site, GpuInterval(device) if site.is_due else None, perf_counter()

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
        """Totals since the start, and the number of steps with them."""
        if self._first_step is None:
            return {}
        self._settle()
        found = [site.to_record() for site in self._lines.values() if site.count]
        return {"copies": found, "copies_steps": max(0, self._tracker.steps - self._first_step)}


def _target_of_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The GPU that `Tensor.to` copies to; None for a conversion on the host."""
    target = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if isinstance(target, str):
        return target if target.startswith("cuda") else None
    if isinstance(target, Tensor):
        target = target.device
    if isinstance(target, torch.device):
        return target if target.type == "cuda" else None
    return target if type(target) is int else None


def _target_of_cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0] if args else kwargs.get("device")
    return "cuda" if target is None else target
