"""Timestamps and busy time of device work on the clock of this process (`perf_counter`).

A GPU executes work after the program submits it. The time at which it reaches a point is therefore
a mark (a CUDA event), which is converted to seconds after the GPU has passed it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

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

    def mark_behind(self, wait: Callable[[], object]) -> Moment:
        """Return the time at which the device completes what `wait` orders a stream behind.

        The current stream does not wait for it. In a capture, `join` must follow.
        """
        wait()
        return self.mark()

    def join(self) -> None:
        """Order the current stream behind all marks of `mark_behind`, if it is being captured."""

    def seconds(self, moment: Moment) -> float:
        """Convert to `perf_counter` seconds; waits until the device has passed the mark."""
        assert isinstance(moment, float)
        return moment


class MarkStreams(Protocol):
    """Records the marks of a timeline."""

    def record(self) -> Mark:
        """Mark the current stream."""

    def record_behind(self, wait: Callable[[], object]) -> Mark:
        """Mark a stream that `wait` orders behind other work."""

    def join(self) -> None:
        """Order the current stream behind that of `record_behind`, if it is being captured."""

    def record_anchor(self) -> Mark:
        """Mark a stream without work."""


class GpuTimeline(Timeline):
    """Timeline of a GPU."""

    def __init__(self, streams: MarkStreams) -> None:
        self._streams = streams
        self._anchor: tuple[Mark, float] | None = None

    def mark(self) -> Moment:
        return self._streams.record()

    def mark_behind(self, wait: Callable[[], object]) -> Moment:
        return self._streams.record_behind(wait)

    def join(self) -> None:
        self._streams.join()

    def seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        anchor, anchored = self._anchor or self._new_anchor()
        if perf_counter() - anchored > ANCHOR_SECONDS:
            anchor, anchored = self._new_anchor()
        return anchored + anchor.elapsed_time(moment) / 1000

    def _new_anchor(self) -> tuple[Mark, float]:
        mark = self._streams.record_anchor()
        mark.synchronize()
        self._anchor = (mark, perf_counter())
        return self._anchor


def is_capturing() -> bool:
    """Return whether the work of the current stream is captured in a CUDA graph, not executed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _CudaMarkStreams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side, self._idle = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def record(self) -> Mark:
        return self._record_on(torch.cuda.current_stream(self._device))

    def record_behind(self, wait: Callable[[], object]) -> Mark:
        with torch.cuda.stream(self._side):
            wait()
            return self._record_on(self._side)

    def join(self) -> None:
        # A capture must end with all of its streams joined.
        if is_capturing():
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def record_anchor(self) -> Mark:
        return self._record_on(self._idle)

    def _record_on(self, stream: torch.cuda.Stream) -> Mark:
        # Within a CUDA graph, only an external event gets the time of each replay.
        event = torch.cuda.Event(enable_timing=True, external=is_capturing())
        event.record(stream)
        return event


def timeline_of(device: torch.device) -> Timeline:
    """Return the timeline of a device."""
    return Timeline() if device.type != "cuda" else GpuTimeline(_CudaMarkStreams(device))


@dataclass(slots=True)
class Interval:
    """A transfer: from the moment its input is ready to the moment its output is ready."""

    timeline: Timeline
    began: Moment
    ended: Moment | None = None

    @classmethod
    def begin(cls, timeline: Timeline) -> Interval:
        """Begin a transfer of what the current stream computes; the caller sets `ended`."""
        return cls(timeline, timeline.mark())

    def span(self) -> tuple[float, float]:
        """Convert to `perf_counter` seconds; waits until the device has passed both marks."""
        assert self.ended is not None, "the transfer has not ended"
        return self.timeline.seconds(self.began), self.timeline.seconds(self.ended)


def busy_seconds(spans: Iterable[tuple[float, float]], until: float = math.inf) -> float:
    """Return the time during which at least one transfer was in progress, up to `until`."""
    total, last = 0.0, -math.inf
    for began, ended in sorted(spans):
        end = min(ended, until)
        total += max(0.0, end - max(began, last))
        last = max(last, end)
    return total
