"""Makes progress on the operations of one rank, and detects peers that stop responding.

There is no progress thread: an operation starts when it is called and makes progress during every
later call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Protocol

from paceline.comm.communicator import OperationContext
from paceline.comm.shm.futex import FutexSignals
from paceline.comm.work import Work
from paceline.errors import PeerError

EXIT_CHECK_SECONDS = 0.005
"""Minimum time between checks for exited peers while polling; each check polls every peer."""


class Operation(Protocol):
    """An operation that progresses without blocking: a collective, a barrier or a message."""

    @property
    def is_complete(self) -> bool: ...

    def progress(self) -> bool:
        """Make as much progress as possible; return whether there was any."""


class ProgressEngine:
    """The operations of one rank that are in progress."""

    def __init__(
        self, signals: FutexSignals, timeout_seconds: float, global_ranks: Sequence[int]
    ) -> None:
        self._signals = signals
        self._timeout_seconds, self._global_ranks = timeout_seconds, global_ranks
        self._pending: deque[PendingWork] = deque()
        self._failure: PeerError | None = None
        self._no_progress_since: float | None = None
        """Time of the first poll without progress; None after progress."""
        self._last_exit_check = 0.0
        self._is_closed = False

    def check(self, context: OperationContext) -> None:
        """Raise PeerError if a new operation could not complete."""
        if self._is_closed or self._failure is not None:
            raise self._failure or context.failed("the connection was closed")

    def start(self, operation: Operation, context: OperationContext) -> PendingWork:
        work = PendingWork(self, operation, context)
        self._pending.append(work)
        self.progress()
        return work

    def close(self) -> None:
        """Disconnect from the peers; may be called repeatedly."""
        if not self._is_closed:
            self._is_closed = True
            self._signals.disconnect()

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def is_busy(self) -> bool:
        """Whether an operation that may need this rank is in progress."""
        return bool(self._pending)

    def progress(self) -> bool:
        """Make progress on all operations without blocking; return whether any progressed."""
        has_progressed = False
        for work in self._pending:
            if work.operation.progress():
                has_progressed = True
                work.complete_if_done()
        if has_progressed:
            self._no_progress_since = None
            while self._pending and self._pending[0].operation.is_complete:
                self._pending.popleft()
        return has_progressed

    def complete(self, work: PendingWork) -> None:
        """Make progress until an operation is complete.

        Raises PeerError if a peer exits, disconnects or times out.
        """
        last_progress = monotonic()
        while not work.operation.is_complete:
            if self._is_closed:
                self._failure = work.context.failed("the connection was closed")
            if self._failure is not None:
                raise self._failure
            if self.progress() or self._signals.wait(self.progress):
                last_progress = monotonic()
            else:
                self._failure = self._find_failure(work.context, monotonic() - last_progress)

    def would_complete(self, work: PendingWork) -> bool:
        """Return whether `complete` would return, or raise, without blocking."""
        self.progress()
        if work.operation.is_complete or self._is_closed:
            return True
        if self._failure is None:
            now = monotonic()
            if self._no_progress_since is None:
                self._no_progress_since = now
            if now - self._last_exit_check >= EXIT_CHECK_SECONDS:
                self._last_exit_check = now
                self._failure = self._find_failure(work.context, now - self._no_progress_since)
        return self._failure is not None

    def _find_failure(
        self, context: OperationContext, seconds_without_progress: float
    ) -> PeerError | None:
        disconnected, exited = (
            [self._global_ranks[peer] for peer in peers]
            for peers in self._signals.disconnected_and_exited_peers()
        )
        gone = [peer for peer in context.peers if peer in disconnected or peer in exited]
        # Data that a peer wrote before it disconnected or exited may still complete the operation.
        if gone and not self.progress():
            cause = "its process exited" if gone[0] in exited else "the connection was closed"
            return OperationContext(context.rank, context.name, (gone[0],)).failed(cause)
        if seconds_without_progress > self._timeout_seconds:
            return context.timed_out(self._timeout_seconds)
        return None


class PendingWork(Work):
    """An operation of an engine."""

    def __init__(
        self, engine: ProgressEngine, operation: Operation, context: OperationContext
    ) -> None:
        super().__init__()
        self.operation, self.context = operation, context
        self._engine = engine

    def complete_if_done(self) -> None:
        if self.operation.is_complete:
            self._complete()

    def _block(self) -> None:
        self._engine.complete(self)

    def _poll(self) -> bool:
        return self._engine.would_complete(self)
