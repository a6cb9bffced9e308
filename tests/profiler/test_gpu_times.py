"""Intervals between CUDA events, with streams that are none of CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.profiler.tracking.gpu_times import GpuInterval


class Event:
    """Notes the device whose stream records it."""

    device: Any = None

    def __init__(self, enable_timing: bool) -> None: ...

    def record(self) -> None:
        self.device = "cuda:0"

    def query(self) -> bool:
        return self.device is not None

    def elapsed_time(self, end: Event) -> float:
        assert (self.device, end.device) == ("cuda:1", "cuda:1")
        return 2.0


class Stream:
    def __init__(self, device: Any) -> None:
        self.device = device or "cuda:0"

    def record_event(self, event: Event) -> Event:
        event.device = self.device
        return event


def test_both_events_are_in_a_stream_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    interval = GpuInterval("cuda:1")
    assert not interval.is_completed()
    interval.end()
    assert interval.is_completed()
    assert interval.seconds() == 0.002
