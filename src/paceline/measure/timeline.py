"""Timestamps and busy time of device work on the clock of this process (`perf_counter`).

A GPU executes work after the program submits it. The time at which it reaches a point is therefore
a mark (a CUDA event), which is converted to seconds after the GPU has passed it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from paceline.measure.phase_clock import Mark

Moment = float | Mark
"""Seconds of `perf_counter`, or a mark in the work of a GPU."""

ANCHOR_SECONDS = 0.1
"""Lifetime of an anchor, known on both clocks; they drift by less than 10 us in this time."""


class Timeline:
    """Timeline of a CPU, whose work is done when a call returns."""

    def mark(self) -> Moment:
        """Return the time at which the device completes the work submitted so far."""
        return perf_counter()

    def seconds(self, moment: Moment) -> float:
        """Convert to `perf_counter` seconds; waits until the device has passed the mark."""
        assert isinstance(moment, float)
        return moment


class GpuTimeline(Timeline):
    """Timeline of a GPU."""

    def __init__(self, record_mark: Callable[[], Mark], record_anchor: Callable[[], Mark]) -> None:
        """`record_mark` marks the current stream; `record_anchor` marks a stream without work."""
        self._record_mark, self._record_anchor = record_mark, record_anchor
        self._anchor: tuple[Mark, float] | None = None

    def mark(self) -> Moment:
        return self._record_mark()

    def seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        anchor, anchored = self._anchor or self._new_anchor()
        if perf_counter() - anchored > ANCHOR_SECONDS:
            anchor, anchored = self._new_anchor()
        return anchored + anchor.elapsed_time(moment) / 1000

    def _new_anchor(self) -> tuple[Mark, float]:
        mark = self._record_anchor()
        mark.synchronize()
        self._anchor = (mark, perf_counter())
        return self._anchor


def timeline_of(device: torch.device) -> Timeline:
    """Return the timeline of a device."""
    if device.type != "cuda":
        return Timeline()
    idle = torch.cuda.Stream(device)

    def record(stream: torch.cuda.Stream) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    return GpuTimeline(lambda: record(torch.cuda.current_stream(device)), lambda: record(idle))


@dataclass(slots=True)
class Interval:
    """A transfer: from the moment its input is ready to the moment its output is ready."""

    began: Moment
    ended: Moment | None = None


class BusyTimer:
    """Records transfers, which may overlap and may end on any thread."""

    def __init__(self, timeline: Timeline) -> None:
        """`timeline` is the timeline of the device that computes the inputs."""
        self._timeline = timeline
        self._intervals: list[Interval] = []

    def begin(self) -> Interval:
        """Begin a transfer of what the current stream computes; the caller sets `ended`."""
        interval = Interval(self._timeline.mark())
        self._intervals.append(interval)
        return interval

    def take(self) -> list[Interval]:
        """Return the transfers since the last call."""
        intervals, self._intervals = self._intervals, []
        return intervals

    def spans(self, intervals: Sequence[Interval]) -> list[tuple[float, float]]:
        """Convert to `perf_counter` seconds; waits until the device has passed all marks."""
        seconds = self._timeline.seconds
        spans = []
        for interval in intervals:
            assert interval.ended is not None, "the transfer has not ended"
            spans.append((seconds(interval.began), seconds(interval.ended)))
        return spans


def busy_seconds(spans: Iterable[tuple[float, float]], until: float = math.inf) -> float:
    """Return the time during which at least one transfer was in progress, up to `until`."""
    total, last = 0.0, -math.inf
    for began, ended in sorted(spans):
        end = min(ended, until)
        total += max(0.0, end - max(began, last))
        last = max(last, end)
    return total
