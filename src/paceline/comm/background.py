"""A communication thread, which runs blocking collectives while the caller computes.

On a GPU, the caller and the thread use different streams, which run independently. A
`StreamOrdering` makes the thread's work start after the caller's.
"""

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


class StreamOrdering(Protocol):
    """Orders the work that two threads submit to a device."""

    def mark(self) -> object:
        """Mark the work that the calling thread has submitted so far."""

    def after(self, mark: object) -> AbstractContextManager[None]:
        """Run the block after the marked work; exit once the work of the block is complete."""


class CudaStreamOrdering:
    """Orders work with CUDA streams and events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def after(self, mark: object) -> Iterator[None]:
        assert isinstance(mark, torch.cuda.Event)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
            self._stream.synchronize()


def stream_ordering(device: torch.device) -> StreamOrdering | None:
    """Return the ordering for a device, or None for the CPU, where calls are synchronous."""
    return CudaStreamOrdering(device) if device.type == "cuda" else None


class CommunicationThread:
    """Runs blocking communication in order on a separate thread.

    It uses a duplicate of the communicator, so that its messages never mix with those of the
    caller's thread. Creating one is collective, and all ranks submit the same operations in the
    same order. For example, to run an all-reduce algorithm without blocking:

        background.submit(
            lambda communicator: algorithm.all_reduce(communicator, tensor, kind), tensor.device
        )
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator.dup()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._orderings: dict[torch.device, StreamOrdering | None] = {}
        # A daemon, so that a failed program exits even if its communicators are still open.
        self._thread = Thread(
            target=self._run, name=f"paceline-communication-{communicator.rank}", daemon=True
        )
        self._thread.start()

    def submit(
        self, operation: Callable[[Communicator], None], device: torch.device | None = None
    ) -> Work:
        """Run an operation after all previously submitted operations.

        `device` is the device of its tensors. On a GPU, the operation starts after the work on the
        caller's current stream and completes once the GPU has finished it, so work that is
        submitted after `wait()` sees the result on any stream.
        """
        task = _Task(operation, self._stream_context(device))
        self._tasks.put(task)
        return task

    def _stream_context(self, device: torch.device | None) -> AbstractContextManager[None]:
        if device is None:
            return nullcontext()
        if device not in self._orderings:
            self._orderings[device] = stream_ordering(device)
        ordering = self._orderings[device]
        return nullcontext() if ordering is None else ordering.after(ordering.mark())

    def close(self) -> None:
        """Stop the thread; operations that are still in progress fail."""
        self._tasks.put(None)
        self._communicator.close()
        self._thread.join()

    def _run(self) -> None:
        failure: Exception | None = None
        while (task := self._tasks.get()) is not None:
            # After a failure, messages of different ranks no longer match, so nothing more is sent.
            failure = task.run(self._communicator) if failure is None else task.fail(failure)


class _Task(Work):
    def __init__(
        self,
        operation: Callable[[Communicator], None],
        stream_context: AbstractContextManager[None],
    ) -> None:
        super().__init__()
        self._operation = operation
        self._stream_context = stream_context
        self._finished = Event()
        self._failure: Exception | None = None

    def run(self, communicator: Communicator) -> Exception | None:
        try:
            with self._stream_context:
                self._operation(communicator)
        except Exception as error:  # noqa: BLE001 - raised again in wait()
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
