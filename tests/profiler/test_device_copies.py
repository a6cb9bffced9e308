"""Copies from the host to a GPU, with a tensor that claims to be on one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.profiler import device_copies
from paceline.profiler.device_copies import DeviceCopies
from paceline.profiler.hooks import Hooks
from paceline.profiler.step_tracker import StepTracker


class OnGpu(Tensor):
    """As far as `is_cuda` tells."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]  # an attribute of Tensor
        return True


class Interval:
    """Time that a GPU takes for a copy."""

    def end(self) -> None: ...

    def is_completed(self) -> bool:
        return True

    def seconds(self) -> float:
        return 0.001


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> StepTracker:
    monkeypatch.setattr(device_copies, "GpuInterval", Interval)
    return StepTracker(lambda: None)


@pytest.fixture
def counted(tracker: StepTracker) -> Iterator[DeviceCopies]:
    copies, hooks = DeviceCopies(tracker), Hooks()
    copies.install(hooks, lambda function: function)
    yield copies
    hooks.remove()


def records(copies: DeviceCopies) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = copies.records().get("copies", [])
    return found


def test_copies_are_counted_by_line(counted: DeviceCopies, tracker: StepTracker) -> None:
    batch, on_gpu = torch.ones(256), torch.zeros(256).as_subclass(OnGpu)
    for _ in range(10):
        on_gpu.copy_(batch), on_gpu.copy_(batch, True)
        number = sys._getframe().f_lineno - 1
        tracker.steps += 1
    (found,) = records(counted)
    assert (found["line"], found["file"], found["call"]) == (number, __file__, "Tensor.copy_")
    assert (found["count"], found["steps"], found["bytes"]) == (20, 10, 20 * 1024)
    assert found["blocking_bytes"] == 10 * 1024
    assert found["pageable_bytes"] == found["bytes"]
    assert found["gpu_seconds"] == pytest.approx(0.02)
    assert tracker.timed_calls == 20
    torch.testing.assert_close(on_gpu.as_subclass(Tensor), batch)


def test_the_gpu_time_of_many_copies_is_estimated(counted: DeviceCopies) -> None:
    batch, on_gpu = torch.ones(256), torch.zeros(256).as_subclass(OnGpu)
    for _ in range(1000):
        on_gpu.copy_(batch)
        counted.records()
    (found,) = records(counted)
    assert found["gpu_seconds"] == pytest.approx(1.0)


def test_other_copies_do_not_count(counted: DeviceCopies, tracker: StepTracker) -> None:
    on_gpu = torch.zeros(4).as_subclass(OnGpu)
    torch.zeros(4).copy_(torch.ones(4))
    torch.ones(4).to(torch.float64)
    on_gpu.copy_(on_gpu)
    tracker.clock.enter("evaluate")
    on_gpu.copy_(torch.ones(4))
    assert records(counted) == []
