"""Moments in a device's work, in the time of this process (`perf_counter`).

A GPU does its work later than the program submits it. So the moment at which it gets somewhere is a
mark in its work (a CUDA event), which is converted to seconds once the GPU has passed it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from paceline.measure.phase_clock import Mark

Moment = float | Mark
"""In seconds of `perf_counter`, or a mark in a GPU's work."""

ANCHOR_SECONDS = 0.1
"""For how long a moment known in both times is used: their clocks drift apart by under 10 us."""


class Timeline:
    """Of a CPU, which has done its work when the call returns."""

    def mark(self) -> Moment:
        """When the device has done the work that the current stream has so far."""
        return perf_counter()

    def seconds(self, moment: Moment) -> float:
        """A moment in the time of `perf_counter`; waits until the device has passed it."""
        assert isinstance(moment, float)
        return moment


class GpuTimeline(Timeline):
    def __init__(self, put_mark: Callable[[], Mark], put_anchor: Callable[[], Mark]) -> None:
        """`put_mark`: behind the current stream's work; `put_anchor`: where nothing delays it."""
        self._put_mark, self._put_anchor = put_mark, put_anchor
        self._anchor: tuple[Mark, float] | None = None

    def mark(self) -> Moment:
        return self._put_mark()

    def seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        anchor, anchored = self._anchor or self._new_anchor()
        if perf_counter() - anchored > ANCHOR_SECONDS:
            anchor, anchored = self._new_anchor()
        return anchored + anchor.elapsed_time(moment) / 1000

    def _new_anchor(self) -> tuple[Mark, float]:
        mark = self._put_anchor()
        mark.synchronize()
        self._anchor = (mark, perf_counter())
        return self._anchor


def timeline_of(device: torch.device) -> Timeline:
    if device.type != "cuda":
        return Timeline()
    idle = torch.cuda.Stream(device)

    def put(stream: torch.cuda.Stream) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    return GpuTimeline(lambda: put(torch.cuda.current_stream(device)), lambda: put(idle))
