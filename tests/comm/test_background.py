"""The communication thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event

import pytest
import torch

from paceline.comm import background as background_module
from paceline.comm.background import CommunicationThread
from paceline.comm.communicator import Communicator
from paceline.comm.in_process import InProcessGroup, run
from paceline.errors import PeerError
from tests.support.worker_pool import WorkerPool


def note(done: list[int], number: int, _: Communicator) -> None:
    done.append(number)


def test_operations_run_in_the_order_of_submission() -> None:
    done: list[int] = []
    with InProcessGroup(1) as hub:
        background = CommunicationThread(hub.communicators[0])
        works = [background.submit(partial(note, done, i)) for i in range(5)]
        works[4].wait()
        background.close()
    assert done == [0, 1, 2, 3, 4]


def pass_gate(gate: Event) -> None:
    gate.wait(20)


def test_submit_does_not_block_the_caller() -> None:
    gate = Event()
    with InProcessGroup(1) as hub:
        background = CommunicationThread(hub.communicators[0])
        work = background.submit(lambda _: pass_gate(gate))
        was_done = work.is_completed()
        gate.set()
        work.wait()
        background.close()
    assert not was_done
    assert work.is_completed()


def test_nothing_is_sent_after_a_failure() -> None:
    sent: list[int] = []

    def fail(_: Communicator) -> None:
        raise PeerError("rank 0: recv from rank 1: the connection was closed")

    with InProcessGroup(1) as hub:
        background = CommunicationThread(hub.communicators[0])
        works = [background.submit(fail), background.submit(lambda _: sent.append(1))]
        for work in works:
            with pytest.raises(PeerError, match="recv from rank 1"):
                work.wait()
        background.close()
    assert sent == []


def test_run_raises_the_first_failure_and_not_its_consequences() -> None:
    def work(communicator: Communicator) -> None:
        if communicator.rank == 1:
            raise ZeroDivisionError("the cause")
        communicator.barrier().wait()

    with pytest.raises(ZeroDivisionError, match="the cause"):
        run(3, work)


class LazyDevice:
    """Runs the work of a stream only when a thread waits for it; one stream per thread."""

    def __init__(self) -> None:
        self.callers: list[Callable[[], None]] = []
        self.threads: list[Callable[[], None]] = []

    def mark(self) -> int:
        return len(self.callers)

    @contextmanager
    def after(self, mark: object) -> Iterator[None]:
        assert isinstance(mark, int)
        for work in self.callers[:mark]:
            self.threads.append(work)
        yield
        for work in self.threads:
            work()


def test_operation_runs_after_the_callers_device_work_and_completes_with_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an order between the streams, the sum would be computed before the gradient."""
    device, memory = LazyDevice(), {"gradient": 0, "sum": 0}
    monkeypatch.setattr(background_module, "stream_ordering", lambda _: device)

    def add(_: Communicator) -> None:
        device.threads.append(lambda: memory.update(sum=memory["gradient"] + 1))

    with InProcessGroup(1) as hub:
        background = CommunicationThread(hub.communicators[0])
        device.callers.append(lambda: memory.update(gradient=5))
        work = background.submit(add, torch.device("meta"))
        device.callers.append(lambda: memory.update(gradient=100))
        work.wait()
        background.close()
    assert memory == {"gradient": 5, "sum": 6}


SLEEP_CYCLES = 10**9


def sum_on_side_stream(communicator: Communicator) -> list[int]:
    """Sum in a thread of this process (gloo does not sum this dtype)."""
    tensor = torch.zeros(1000, dtype=torch.int16, device="cuda:0")
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        tensor.fill_(communicator.rank + 1)
        work = communicator.all_reduce(tensor, "gradients")
    work.wait()
    with torch.cuda.stream(other):
        seen = tensor.clone()
    other.synchronize()
    return [int(value) for value in seen.unique()]


@pytest.mark.gpu
def test_gradients_computed_on_a_side_stream_are_summed_after_it(pool: WorkerPool) -> None:
    assert pool.run(2, sum_on_side_stream) == [[3], [3]]


@pytest.mark.gpu
def test_operation_waits_for_the_callers_stream_on_a_real_gpu() -> None:
    gradient = torch.zeros(1000, device="cuda:0")
    doubled = torch.zeros_like(gradient)
    torch.cuda.synchronize()

    def double(_: Communicator) -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        torch.mul(gradient, 2, out=doubled)

    with InProcessGroup(1) as hub:
        background = CommunicationThread(hub.communicators[0])
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(SLEEP_CYCLES)
            gradient.fill_(1.0)
            work = background.submit(double, gradient.device)
        work.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            seen = doubled.tolist()
        background.close()
    assert seen == [2.0] * 1000
