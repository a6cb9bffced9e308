"""Copies from the host to a GPU, with a tensor that claims to be on one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from paceline.profiler.collection import RankRecord
from paceline.profiler.tracking import device_copies
from paceline.profiler.tracking.device_copies import DeviceCopies
from paceline.profiler.tracking.hooks import Hooks
from paceline.profiler.tracking.step_tracker import StepTracker


class OnGpu(Tensor):
    """As far as `is_cuda` tells."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]  # an attribute of Tensor
        return True


class Interval:
    """Time that a GPU takes for a copy."""

    devices: list[Any]
    """Of those that were created."""

    def __init__(self, device: Any) -> None:
        self.devices.append(device)

    def end(self) -> None: ...

    def is_completed(self) -> bool:
        return True

    def seconds(self) -> float:
        return 0.001


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> StepTracker:
    monkeypatch.setattr(device_copies, "GpuInterval", Interval)
    monkeypatch.setattr(Interval, "devices", [], raising=False)
    return StepTracker(lambda: None)


@pytest.fixture
def counted(tracker: StepTracker) -> Iterator[DeviceCopies]:
    # Tests before this one may have compiled something.
    torch._dynamo.reset()
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
    totals = RankRecord({}, events=[counted.records()]).host_to_device
    # Those of the first step may have begun before.
    assert totals is not None
    assert (totals["iterations"], totals["count"], totals["bytes"]) == (9, 20, 20 * 1024)
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
    torch.ones(4).to("cpu", torch.float64)
    torch.ones(4).to(torch.ones(4, dtype=torch.float64))
    torch.ones(4).to(device=torch.device("cpu"), dtype=torch.float64)
    on_gpu.copy_(on_gpu)
    tracker.clock.enter("evaluate")
    on_gpu.copy_(torch.ones(4))
    assert records(counted) == []
    # An interval costs the program two events of CUDA.
    assert Interval.devices == []


def test_steps_of_which_all_copies_are_counted(tracker: StepTracker) -> None:
    torch._dynamo.reset()
    copies, hooks = DeviceCopies(tracker), Hooks()
    assert copies.records() == {}
    tracker.steps = 3
    copies.install(hooks, lambda function: function)
    hooks.remove()
    # The fourth step, whose update installs it, has made its copies.
    counts = []
    for tracker.steps in (3, 4, 10):
        counts.append(copies.records()["copies_steps"])
    assert counts == [0, 0, 6]
    assert RankRecord({}, events=[copies.records()]).host_to_device is None


@pytest.mark.parametrize("target", ["cuda:1", torch.device("cuda", 1), 1])
def test_the_gpu_of_a_copy_is_that_of_its_target(
    monkeypatch: pytest.MonkeyPatch, tracker: StepTracker, target: Any
) -> None:
    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """There is no GPU to copy to."""
        return tensor

    monkeypatch.setattr(Tensor, "to", to)
    copies, hooks = DeviceCopies(tracker), Hooks()
    torch._dynamo.reset()
    copies.install(hooks, lambda function: function)
    try:
        batch = torch.ones(256)
        batch.to(target), batch.to(device=target, non_blocking=True)
    finally:
        hooks.remove()
    assert Interval.devices == [target, target]
    assert [found["count"] for found in records(copies)] == [2]
    assert Tensor.to is to


class OfScript(Tensor):
    """Its methods are those of Tensor."""


def converted(tensor: Tensor) -> Tensor:
    return Tensor.to(tensor.to(torch.float64), torch.float32) + tensor.cpu().clone().copy_(tensor)


@pytest.mark.parametrize("kind", [Tensor, OfScript])
def test_compiled_code_finds_the_methods_of_torch(counted: DeviceCopies, kind: Any) -> None:
    on_gpu = torch.zeros(4).as_subclass(OnGpu)
    on_gpu.copy_(torch.ones(4))
    counter = CompileCounter()
    compiled = torch.compile(converted, fullgraph=True, backend=counter)
    for _ in range(3):
        result = compiled(torch.ones(4).as_subclass(kind))
        on_gpu.copy_(torch.ones(4))
    torch.testing.assert_close(result.as_subclass(Tensor), torch.full((4,), 2.0))
    assert counter.frame_count == 1
    assert records(counted) == []


def test_copies_after_a_compilation_are_not_counted(tracker: StepTracker) -> None:
    torch._dynamo.reset()
    torch.compile(converted, fullgraph=True, backend="eager")(torch.ones(4))
    hooks = Hooks()
    DeviceCopies(tracker).install(hooks, lambda function: function)
    assert Tensor.to is torch._C.TensorBase.to
    hooks.remove()
