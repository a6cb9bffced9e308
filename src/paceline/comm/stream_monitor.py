"""Detects operations on a GPU that never complete.

`wait` of a stream-ordered operation returns before the GPU has run it. If a peer exits, the GPU
waits for it, and so does the program the next time it synchronizes with the GPU. A thread therefore
checks the operations in progress and reports the first one that fails or exceeds the timeout. The
owner then aborts the connection, which releases the GPU, and raises the error in its next call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Protocol

import torch

from paceline.comm.communicator import OperationContext
from paceline.comm.process_groups import PeerErrorTranslator
from paceline.errors import PeerError

CHECK_SECONDS = 0.2
SYNCHRONIZE_POLL_SECONDS = 0.0001


class Submitted(Protocol):
    """GPU work that was submitted, such as a handle of torch's process groups."""

    def is_completed(self) -> bool:
        """Return whether the GPU has completed the work; raises RuntimeError if it failed."""


@dataclass(frozen=True, slots=True)
class _Watched:
    operation: Submitted
    context: OperationContext
    deadline: float


class StreamMonitor:
    """Watches the operations of one communicator, which the GPU runs in order.

    The last one completes after all others. Only that one and the one being checked are kept,
    because a handle keeps the tensors of its operation alive.
    """

    def __init__(self, timeout_seconds: float, on_failure: Callable[[PeerError], None]) -> None:
        """`on_failure` is called once, on the monitor's thread or in `synchronize`."""
        self._timeout_seconds = timeout_seconds
        self._on_failure = on_failure
        self._last: _Watched | None = None
        self._thread: Thread | None = None
        self._closed = Event()
        self._reporting = Lock()

    def watch(self, operation: Submitted, context: OperationContext) -> None:
        """Watch an operation that was just submitted."""
        self._last = _Watched(operation, context, monotonic() + self._timeout_seconds)
        if self._thread is None:
            self._thread = Thread(target=self._run, name="paceline-stream-monitor", daemon=True)
            self._thread.start()

    def synchronize(self) -> None:
        """Block until the watched operations are complete or have failed."""
        last = self._last
        while last is not None and not self._closed.is_set() and not self._is_over(last):
            sleep(SYNCHRONIZE_POLL_SECONDS)

    def close(self) -> None:
        self._closed.set()
        self._last = None

    def _run(self) -> None:
        checked: _Watched | None = None
        while not self._closed.wait(CHECK_SECONDS):
            if checked is None or self._is_over(checked):
                checked = self._last if self._last is not checked else None

    def _is_over(self, watched: _Watched) -> bool:
        """Return whether an operation is complete or has failed; report its failure."""
        try:
            with PeerErrorTranslator(watched.context, self._timeout_seconds):
                if watched.operation.is_completed():
                    return True
                if monotonic() <= watched.deadline:
                    return False
                raise watched.context.timed_out(self._timeout_seconds)
        except PeerError as error:
            with self._reporting:
                if not self._closed.is_set():
                    self._on_failure(error)
                    # Last, because `synchronize` returns then, and its caller asks for the error.
                    self.close()
            return True


class ReplayWatcher:
    """Watches the operations of a CUDA graph, which have no handles, each time it is replayed."""

    def __init__(self, monitor: StreamMonitor, context: OperationContext) -> None:
        self._monitor, self._context = monitor, context

    def capture(self) -> AbstractContextManager[None]:
        return nullcontext()

    def before_replay(self, _: None) -> None:
        return

    def replayed(self, _: None) -> None:
        self._monitor.watch(_CudaWork(), self._context)


class _CudaWork:
    """The work that was submitted to the current stream so far."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def is_completed(self) -> bool:
        return bool(self._event.query())
