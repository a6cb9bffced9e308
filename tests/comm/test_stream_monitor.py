"""Stream-ordered operations that fail after `wait` has returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from paceline.comm import stream_monitor, torch_distributed
from paceline.comm.communicator import OperationContext
from paceline.comm.stream_monitor import StreamMonitor
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.errors import PeerError

LIMIT_SECONDS = 30.0
CONTEXT = OperationContext(0, "all_reduce with", (1,))


class Operation:
    """GPU work that completes or fails when the test says so."""

    def __init__(self) -> None:
        self.is_over = False
        self.error: str | None = None
        self.waited = 0

    def is_completed(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.is_over

    def wait(self) -> None:
        self.waited += 1


class Failures:
    """Collects what a monitor reports."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.reported = Event()

    def __call__(self, error: PeerError) -> None:
        self.errors.append(str(error))
        self.reported.set()


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
def watch(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[float], StreamMonitor]]:
    monkeypatch.setattr(stream_monitor, "CHECK_SECONDS", 0.01)
    monitors: list[StreamMonitor] = []

    def create(timeout_seconds: float) -> StreamMonitor:
        monitors.append(StreamMonitor(timeout_seconds, failures))
        return monitors[-1]

    yield create
    for monitor in monitors:
        monitor.close()


def test_operation_that_never_completes_is_reported(
    watch: Callable[[float], StreamMonitor], failures: Failures
) -> None:
    watch(0.05).watch(Operation(), CONTEXT)
    assert failures.reported.wait(LIMIT_SECONDS)
    message = "rank 0: all_reduce with rank 1: no response within the timeout of 0.05 s"
    assert failures.errors == [message]


def test_error_of_an_operation_is_reported_before_the_timeout(
    watch: Callable[[float], StreamMonitor], failures: Failures
) -> None:
    operation = Operation()
    operation.error = "ncclRemoteError: a remote peer reset the connection\nand more"
    watch(1000.0).watch(operation, CONTEXT)
    assert failures.reported.wait(LIMIT_SECONDS)
    assert failures.errors == ["rank 0: all_reduce with rank 1: the connection was closed"]


def test_completed_operations_are_not_reported(
    watch: Callable[[float], StreamMonitor], failures: Failures
) -> None:
    monitor = watch(0.05)
    for _ in range(3):
        operation = Operation()
        operation.is_over = True
        monitor.watch(operation, CONTEXT)
        monitor.synchronize()
    assert not failures.reported.wait(0.2)


def test_later_operation_is_checked_after_an_earlier_one(
    watch: Callable[[float], StreamMonitor], failures: Failures
) -> None:
    monitor, first = watch(0.05), Operation()
    first.is_over = True
    monitor.watch(first, CONTEXT)
    monitor.watch(Operation(), CONTEXT)
    assert failures.reported.wait(LIMIT_SECONDS)


def test_synchronize_returns_after_a_failure_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_monitor, "CHECK_SECONDS", 0.01)
    began = Event()
    reported: list[PeerError] = []

    def on_failure(error: PeerError) -> None:
        began.set()
        sleep(0.2)
        reported.append(error)

    monitor = StreamMonitor(0.01, on_failure)
    monitor.watch(Operation(), CONTEXT)
    assert began.wait(LIMIT_SECONDS)
    monitor.synchronize()
    assert len(reported) == 1


GPU = torch.device("meta")


class HangingNccl:
    """Starts operations that never complete."""

    def __init__(self) -> None:
        self.operation = Operation()
        self.is_aborted = False

    def allreduce(self, _tensors: list[Tensor]) -> Operation:
        return self.operation

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TorchCommunicator, HangingNccl]]:
    nccl: Any = HangingNccl()
    monkeypatch.setattr(stream_monitor, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(torch_distributed, "create_nccl", lambda *_: nccl)
    # There is no second rank whose connections it could close.
    monkeypatch.setattr(torch_distributed, "abort_gloo", lambda *_: None)
    with TorchCommunicator(
        HashStore(), 0, 1, address="127.0.0.1", gpu=GPU, timeout_seconds=0.05
    ) as communicator:
        communicator.world_size, communicator.global_ranks = 2, range(2)
        yield communicator, nccl
        communicator.world_size = 1


def test_failure_after_wait_releases_the_gpu_and_is_raised_later(
    connected: tuple[TorchCommunicator, HangingNccl],
) -> None:
    communicator, nccl = connected
    communicator.all_reduce(torch.empty(3, device=GPU), "gradients").wait()
    message = "rank 0: all_reduce with rank 1: no response within the timeout of 0.05 s"
    with pytest.raises(PeerError, match=message):
        communicator.synchronize()
    assert nccl.is_aborted
    # Also of operations that do not use the GPU.
    for device in (GPU, torch.device("cpu")):
        with pytest.raises(PeerError, match=message):
            communicator.all_reduce(torch.zeros(3, device=device), "gradients")


def test_wait_of_a_stream_ordered_operation_does_not_block(
    connected: tuple[TorchCommunicator, HangingNccl],
) -> None:
    communicator, nccl = connected
    work = communicator.all_reduce(torch.empty(3, device=GPU), "gradients")
    assert not work.is_completed()
    work.wait()
    assert nccl.operation.waited == 1
    nccl.operation.is_over = True
    communicator.synchronize()
