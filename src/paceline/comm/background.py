"""The order of work on a GPU when one thread submits it and another carries it out.

Each thread gives its work to a stream of its own, and streams run independently of one another.

Communication beside computation: operations that run in order on a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.comm.work import Work

if TYPE_CHECKING:
    from paceline.comm.communicator import Communicator


class DeviceOrder(Protocol):
    def mark(self) -> object:
        """The work that the calling thread has given to the device so far."""

    def behind(self, mark: object) -> AbstractContextManager[None]:
        """Start the block's work after the marked work, and leave the block when it is done."""


class GpuOrder:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def behind(self, mark: object) -> Iterator[None]:
        assert isinstance(mark, torch.cuda.Event)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
            self._stream.synchronize()


def order_on(device: torch.device) -> DeviceOrder | None:
    """None where work is done when its call returns, as on a CPU."""
    return GpuOrder(device) if device.type == "cuda" else None


class CommunicationThread:
    """Runs blocking communication without blocking the caller.

    It talks through a fork of the communicator it is given, so that its messages never mix with
    those of the caller's thread. Making one is collective, and all ranks submit the same operations
    in the same order. An algorithm's all-reduce in non-blocking form is

        background.submit(
            lambda communicator: algorithm.all_reduce(communicator, tensor, kind), tensor.device
        )
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator.dup()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._orders: dict[torch.device, DeviceOrder | None] = {}
        # A daemon, so that a failing program ends even where nobody closed its communicators.
        self._thread = Thread(
            target=self._run, name=f"paceline-communication-{communicator.rank}", daemon=True
        )
        self._thread.start()

    def submit(
        self, operation: Callable[[Communicator], None], device: torch.device | None = None
    ) -> Work:
        """Run an operation after those submitted before it.

        `device`: where its tensors are. On a GPU the operation starts after the work that the
        caller's current stream has so far, and is complete once the GPU has finished its work, so
        whatever is started after `wait()` sees the result, on any stream.
        """
        task = _Task(operation, self._after_caller(device))
        self._tasks.put(task)
        return task

    def _after_caller(self, device: torch.device | None) -> AbstractContextManager[None]:
        if device is None:
            return nullcontext()
        if device not in self._orders:
            self._orders[device] = order_on(device)
        order = self._orders[device]
        return nullcontext() if order is None else order.behind(order.mark())

    def close(self) -> None:
        """End the thread; what was submitted and never waited for is given up."""
        self._tasks.put(None)
        self._communicator.close()
        self._thread.join()

    def _run(self) -> None:
        broken: Exception | None = None
        while (task := self._tasks.get()) is not None:
            # After a failure the ranks are out of step, so nothing more may be sent.
            broken = task.run(self._communicator) if broken is None else task.fail(broken)


class _Task(Work):
    def __init__(
        self, operation: Callable[[Communicator], None], after_caller: AbstractContextManager[None]
    ) -> None:
        super().__init__()
        self._operation = operation
        self._after_caller = after_caller
        self._finished = Event()
        self._failure: Exception | None = None

    def run(self, communicator: Communicator) -> Exception | None:
        try:
            with self._after_caller:
                self._operation(communicator)
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits
            self._failure = error
        self._finished.set()
        self._complete()
        return self._failure

    def fail(self, cause: Exception) -> Exception:
        self._failure = cause
        self._finished.set()
        self._complete()
        return cause

    def _block(self) -> None:
        self._finished.wait()
        if self._failure is not None:
            raise self._failure

    def _poll(self) -> bool:
        return self._finished.is_set()
