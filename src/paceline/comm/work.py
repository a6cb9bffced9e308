"""An operation under way: every operation of a communicator returns a `Work`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Event, Lock, get_ident
from time import perf_counter


class Work(ABC):
    """`wait()` finishes the operation; a blocking call is `communicator.send(...).wait()`.

    Until `wait()` has returned, the tensors given to the operation must be neither changed nor
    read, and the operation is not sure to have any effect. A Work is used by one thread at a time.
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
        """Only where there are callbacks; set once all of them have run."""
        self._callback_thread: int | None = None

    def wait(self) -> None:
        """Return once the operation is complete here; raise what went wrong, each time asked."""
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
                self._await_callbacks()
                for action in self._on_end:
                    action()
        elif self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether `wait()` would return, or raise, without blocking."""
        return self._ended or self._poll()

    def on_success(self, action: Callable[[], None]) -> Work:
        """Let `wait()` do this before it returns, for example copy a buffer to its place."""
        self._on_success.append(action)
        return self

    def on_end(self, action: Callable[[], None]) -> Work:
        """Let `wait()` do this last, whether the operation succeeded or not."""
        self._on_end.append(action)
        return self

    def add_done_callback(self, action: Callable[[float], None]) -> None:
        """Call this with the moment (of `perf_counter`) at which the operation was complete.

        On any thread, as soon as one notices it, and before `wait()` returns. The moment is that of
        the completion, even where it is noticed later. No lock is held meanwhile.
        """
        with self._completing:
            if self._completed is None:
                self._on_completion.append(action)
                return
        action(self._completed)

    def _complete(self, moment: float | None = None) -> None:
        """Note that the operation is complete, since `moment` or now; only the first call counts.

        For operations that are complete before somebody waits for them.
        """
        with self._completing:
            if self._completed is not None:
                return
            self._completed = perf_counter() if moment is None else moment
            if not self._on_completion:
                return
            self._callbacks_done, self._callback_thread = Event(), get_ident()
        try:
            for action in self._on_completion:
                action(self._completed)
        finally:
            self._callbacks_done.set()

    def _await_callbacks(self) -> None:
        """Wait until the callbacks have run, unless one of them is asking."""
        if self._callbacks_done is not None and self._callback_thread != get_ident():
            self._callbacks_done.wait()

    @abstractmethod
    def _block(self) -> None:
        """Wait for the end of the operation."""

    @abstractmethod
    def _poll(self) -> bool:
        """Whether `_block` would come back at once."""


class CompletedWork(Work):
    """An operation that had nothing left to do when it was started."""

    def __init__(self) -> None:
        super().__init__()
        self._complete()

    def _block(self) -> None:
        return

    def _poll(self) -> bool:
        return True


class CombinedWork(Work):
    """Several operations as one."""

    def __init__(self, parts: Sequence[Work]) -> None:
        super().__init__()
        self._parts = parts
        self._last = 0.0
        self._incomplete = len(parts)

    def add_done_callback(self, action: Callable[[float], None]) -> None:
        is_first = not self._on_completion
        super().add_done_callback(action)
        if is_first:
            for part in self._parts:
                part.add_done_callback(self._note_part)

    def _note_part(self, moment: float) -> None:
        with self._completing:
            self._last = max(self._last, moment)
            self._incomplete -= 1
            is_last = self._incomplete == 0
        if is_last:
            self._complete(self._last)

    def _block(self) -> None:
        for part in self._parts:
            part.wait()

    def _poll(self) -> bool:
        return all(part.is_completed() for part in self._parts)
