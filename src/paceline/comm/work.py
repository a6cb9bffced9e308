"""Handles for operations in progress. Every communicator operation returns a `Work`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Event, Lock, get_ident
from time import perf_counter

from paceline.measure.timeline import Moment


class Work(ABC):
    """An operation in progress; a blocking call is `communicator.send(...).wait()`.

    Until `wait()` returns, the caller must neither modify nor read the tensors of the operation,
    and results may be missing. A Work is used by one thread at a time.

    An operation on tensors of a GPU may be stream-ordered: `wait()` returns at once, and what the
    caller submits to the current stream afterward runs behind the operation.
    """

    def __init__(self) -> None:
        self._ended = False
        self._error: BaseException | None = None
        self._on_end: list[Callable[[Moment | None], None]] = []
        self._on_success: list[Callable[[], None]] = []
        self._completed: Moment | None = None
        self._on_completion: list[Callable[[Moment], None]] = []
        self._completing = Lock()
        self._callbacks_done: Event | None = None
        """Set once all done callbacks have run; None if there are none."""
        self._callback_thread: int | None = None

    def wait(self) -> None:
        """Block until the operation is complete, or order the current stream behind it.

        Raises the error of the operation, if any, on every call.
        """
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
                for finish in self._on_end:
                    finish(self._completed)
        elif self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Return whether `wait()` would return, or raise, without blocking."""
        return self._ended or self._poll()

    def on_success(self, action: Callable[[], None]) -> Work:
        """Run `action` in `wait()` if the operation succeeds, for example to copy a buffer."""
        self._on_success.append(action)
        return self

    def on_end(self, action: Callable[[Moment | None], None]) -> Work:
        """Run `action` with the completion time at the end of `wait()`, also after an error."""
        self._on_end.append(action)
        return self

    def add_done_callback(self, action: Callable[[Moment], None]) -> None:
        """Call `action` with the completion time of the operation.

        The callback runs on the thread that detects the completion, which may be any thread, and
        before `wait()` returns. The time is that of the completion, even if it is detected later:
        in seconds of `perf_counter`, or, for a stream-ordered operation, as a mark that the GPU has
        not passed yet. No lock is held during the call.
        """
        with self._completing:
            if self._completed is None:
                self._on_completion.append(action)
                return
        action(self._completed)

    def _complete(self, completion_time: Moment | None = None) -> None:
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
        self._last_completion: Moment = 0.0
        self._incomplete = len(works)

    def add_done_callback(self, action: Callable[[Moment], None]) -> None:
        is_first = not self._on_completion
        super().add_done_callback(action)
        if is_first:
            for work in self._works:
                work.add_done_callback(self._record_completion)

    def _record_completion(self, completion_time: Moment) -> None:
        with self._completing:
            last = self._last_completion
            if isinstance(completion_time, float) and isinstance(last, float):
                completion_time = max(last, completion_time)
            # The operations of a stream complete in the order in which they start.
            self._last_completion = completion_time
            self._incomplete -= 1
            is_last = self._incomplete == 0
        if is_last:
            self._complete(self._last_completion)

    def _block(self) -> None:
        for work in self._works:
            work.wait()

    def _poll(self) -> bool:
        return all(work.is_completed() for work in self._works)
