"""Handles for operations in progress. Every communicator operation returns a `Work`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Event, Lock, get_ident
from time import perf_counter


class Work(ABC):
    """An operation in progress; a blocking call is `communicator.send(...).wait()`.

    Until `wait()` returns, the caller must neither modify nor read the tensors of the operation,
    and results may be missing. A Work is used by one thread at a time.
    """

    def __init__(self) -> None:
        self._ended = False
        self._error: BaseException | None = None
        self._on_end: list[Callable[[], None]] = []
        self._on_success: list[Callable[[], None]] = []
        self._completed: float | None = None
        self._on_completion: list[Callable[[float], None]] = []
        self._completing = Lock()
        self._callbacks_done: Event | None = None
        """Set once all done callbacks have run; None if there are none."""
        self._callback_thread: int | None = None

    def wait(self) -> None:
        """Block until the operation is complete. Raises its error, if any, on every call."""
        if not self._ended:
            self._ended = True
            try:
                self._block()
                for action in self._on_success:
                    action()
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._complete()
                self._wait_for_callbacks()
                for action in self._on_end:
                    action()
        elif self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Return whether `wait()` would return, or raise, without blocking."""
        return self._ended or self._poll()

    def on_success(self, action: Callable[[], None]) -> Work:
        """Run `action` in `wait()` if the operation succeeds, for example to copy a buffer."""
        self._on_success.append(action)
        return self

    def on_end(self, action: Callable[[], None]) -> Work:
        """Run `action` at the end of `wait()`, whether or not the operation succeeds."""
        self._on_end.append(action)
        return self

    def add_done_callback(self, action: Callable[[float], None]) -> None:
        """Call `action` with the completion time of the operation (`perf_counter`).

        The callback runs on the thread that detects the completion, which may be any thread, and
        before `wait()` returns. The time is that of the completion, even if it is detected later.
        No lock is held during the call.
        """
        with self._completing:
            if self._completed is None:
                self._on_completion.append(action)
                return
        action(self._completed)

    def _complete(self, completion_time: float | None = None) -> None:
        """Record the completion time (default: now) and run done callbacks.

        Later calls have no effect. Subclasses call this for operations that complete before
        `wait()`.
        """
        with self._completing:
            if self._completed is not None:
                return
            self._completed = perf_counter() if completion_time is None else completion_time
            if not self._on_completion:
                return
            self._callbacks_done, self._callback_thread = Event(), get_ident()
        try:
            for action in self._on_completion:
                action(self._completed)
        finally:
            self._callbacks_done.set()

    def _wait_for_callbacks(self) -> None:
        """Wait until all done callbacks have run, unless this call comes from one of them."""
        if self._callbacks_done is not None and self._callback_thread != get_ident():
            self._callbacks_done.wait()

    @abstractmethod
    def _block(self) -> None:
        """Wait until the operation is complete; raise its error."""

    @abstractmethod
    def _poll(self) -> bool:
        """Return whether `_block` would return, or raise, without blocking."""


class CompletedWork(Work):
    """An operation that completes immediately."""

    def __init__(self) -> None:
        super().__init__()
        self._complete()

    def _block(self) -> None:
        return

    def _poll(self) -> bool:
        return True


class CombinedWork(Work):
    """Several operations that complete as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works
        self._last_completion = 0.0
        self._incomplete = len(works)

    def add_done_callback(self, action: Callable[[float], None]) -> None:
        is_first = not self._on_completion
        super().add_done_callback(action)
        if is_first:
            for work in self._works:
                work.add_done_callback(self._record_completion)

    def _record_completion(self, completion_time: float) -> None:
        with self._completing:
            self._last_completion = max(self._last_completion, completion_time)
            self._incomplete -= 1
            is_last = self._incomplete == 0
        if is_last:
            self._complete(self._last_completion)

    def _block(self) -> None:
        for work in self._works:
            work.wait()

    def _poll(self) -> bool:
        return all(work.is_completed() for work in self._works)
