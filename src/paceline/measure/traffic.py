"""Traffic counters: bytes and messages that a worker sent and received, by kind.

`messages` counts sent messages, so the sum over workers is the number of messages on the network.
`seconds` is the time during which at least one transfer of a kind was in progress; overlapping
transfers are not counted twice. A transfer lasts from its start until its wait returns; a logged
transfer also records when it completed, if that is observable. A transfer on a GPU lasts from the
mark before it to the mark after it (timeline.py), and its seconds are known once the GPU has passed
both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from threading import Lock
from time import perf_counter

from paceline.measure.timeline import Interval, Moment, busy_seconds
from paceline.records import TRAFFIC_KINDS

MAX_UNSETTLED_TRANSFERS = 4096
"""Transfers on a GPU whose seconds are not known yet; the run logger settles them long before."""


@dataclass(slots=True)
class Count:
    """Totals of one kind of traffic; the fields are record keys."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _InProgress:
    """Transfers of one kind in progress, and since when there has been at least one."""

    transfers: int = 0
    since: float = 0.0


@dataclass(slots=True)
class CountedTransfer:
    """A counted transfer; only `kind` is set if transfers are not logged."""

    kind: str
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    began: float = 0.0
    is_logged: bool = True
    completed: float | None = None
    interval: Interval | None = None
    """The marks of a transfer on a GPU."""

    def complete(self, moment: Moment | None = None) -> None:
        """Record the completion time (default: now) unless it is already recorded."""
        if self.interval is not None:
            if self.interval.ended is None:
                self.interval.ended = self.interval.timeline.mark() if moment is None else moment
        elif self.completed is None:
            self.completed = moment if isinstance(moment, float) else perf_counter()


@dataclass(slots=True)
class CapturedTransfers:
    """The transfers of a CUDA graph, which every replay repeats."""

    transfers: list[CountedTransfer] = field(default_factory=list)
    settled_until: int = 0
    """Number of settled transfers after which the marks of the last replay have been read."""


@dataclass(slots=True)
class Traffic:
    """Counts of one worker; thread-safe."""

    counts: dict[str, Count] = field(
        default_factory=lambda: {kind: Count() for kind in TRAFFIC_KINDS}
    )
    log: list[CountedTransfer] | None = None
    """Individual transfers, while logging is enabled."""
    _in_progress: dict[str, _InProgress] = field(
        default_factory=lambda: {kind: _InProgress() for kind in TRAFFIC_KINDS}
    )
    _unlogged: dict[str, CountedTransfer] = field(
        default_factory=lambda: {
            kind: CountedTransfer(kind, is_logged=False) for kind in TRAFFIC_KINDS
        }
    )
    _unsettled: deque[CountedTransfer] = field(default_factory=deque)
    """Transfers on a GPU that have ended in the program, but maybe not on the GPU."""
    _settled: int = 0
    """Number of transfers on a GPU whose seconds were added."""
    _capturing: CapturedTransfers | None = None
    _lock: Lock = field(default_factory=Lock)
    _settling: Lock = field(default_factory=Lock)
    """Separate, because settling waits for the GPU."""

    def begin(
        self,
        kind: str,
        interval: Interval | None = None,
        /,
        *,
        bytes_sent: int = 0,
        bytes_received: int = 0,
        messages: int = 0,
    ) -> CountedTransfer:
        """Count a transfer that starts now; `end` must be called exactly once.

        `interval` is that of a transfer on a GPU.
        """
        if kind not in self.counts:
            raise ValueError(f"unknown traffic kind {kind!r}: use {', '.join(TRAFFIC_KINDS)}")
        if interval is not None and self._capturing is not None:
            captured = CountedTransfer(kind, bytes_sent, bytes_received, messages)
            captured.interval = interval
            self._capturing.transfers.append(captured)
            return captured
        with self._lock:
            self._add(kind, bytes_sent, bytes_received, messages)
            if interval is None:
                busy = self._in_progress[kind]
                if busy.transfers == 0:
                    busy.since = perf_counter()
                busy.transfers += 1
                if self.log is None:
                    return self._unlogged[kind]
            transfer = CountedTransfer(kind, bytes_sent, bytes_received, messages, perf_counter())
            transfer.interval = interval
            self._log(transfer)
            return transfer

    def _add(self, kind: str, bytes_sent: int, bytes_received: int, messages: int) -> None:
        count = self.counts[kind]
        count.bytes_sent += bytes_sent
        count.bytes_received += bytes_received
        count.messages += messages

    def _log(self, transfer: CountedTransfer) -> None:
        transfer.is_logged = self.log is not None
        if self.log is not None:
            self.log.append(transfer)

    def end(self, transfer: CountedTransfer, moment: Moment | None = None) -> None:
        """End a transfer.

        `moment` is when a transfer on a GPU ends, by default behind the work of the current stream.
        """
        if transfer.interval is not None:
            transfer.complete(moment)
            if self._capturing is None:
                self._unsettled.append(transfer)
                if len(self._unsettled) >= MAX_UNSETTLED_TRANSFERS:
                    # Not the last ones, which the GPU has not completed yet.
                    self._settle_until(self._settled + MAX_UNSETTLED_TRANSFERS // 2)
            return
        if transfer.is_logged:
            transfer.complete()
        with self._lock:
            busy = self._in_progress[transfer.kind]
            busy.transfers -= 1
            if busy.transfers == 0:
                self.counts[transfer.kind].seconds += perf_counter() - busy.since

    def settle(self) -> None:
        """Add the seconds of transfers on a GPU; waits until the GPU has completed them."""
        self._settle_until(self._settled + len(self._unsettled))

    def _settle_until(self, count: int) -> None:
        """Settle transfers until `count` transfers are settled in total."""
        spans: dict[str, list[tuple[float, float]]] = {}
        with self._settling:
            while self._settled < count and self._unsettled:
                transfer = self._unsettled.popleft()
                self._settled += 1
                assert transfer.interval is not None
                transfer.began, transfer.completed = span = transfer.interval.span()
                spans.setdefault(transfer.kind, []).append(span)
            with self._lock:
                for kind, of_kind in spans.items():
                    self.counts[kind].seconds += busy_seconds(of_kind)

    @contextmanager
    def capture(self) -> Iterator[CapturedTransfers]:
        """Record the transfers of a `with` block, which captures them, without counting them."""
        self._capturing = captured = CapturedTransfers()
        try:
            yield captured
        finally:
            self._capturing = None

    def before_replay(self, captured: CapturedTransfers) -> None:
        """Read the marks of the last replay, which the next one overwrites."""
        self._settle_until(captured.settled_until)

    def replayed(self, captured: CapturedTransfers) -> None:
        """Count the transfers of a replay that was just launched."""
        for each in captured.transfers:
            transfer = replace(each)
            with self._lock:
                self._add(each.kind, each.bytes_sent, each.bytes_received, each.messages)
                self._log(transfer)
            self._unsettled.append(transfer)
        captured.settled_until = self._settled + len(self._unsettled)

    def to_dict(self) -> dict[str, dict[str, int | float]]:
        """Return the "traffic" entry of a worker in result.json; `restore` accepts it."""
        self.settle()
        with self._lock:
            return {kind: asdict(count) for kind, count in self.counts.items()}

    def restore(self, state: Mapping[str, Mapping[str, int | float]]) -> None:
        """Restore the counts of an earlier part of a resumed run."""
        with self._lock:
            for kind, values in state.items():
                self.counts[kind] = Count(
                    bytes_sent=int(values["bytes_sent"]),
                    bytes_received=int(values["bytes_received"]),
                    messages=int(values["messages"]),
                    seconds=float(values["seconds"]),
                )
