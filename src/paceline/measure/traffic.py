"""Traffic counters: bytes and messages that a worker sent and received, by kind.

`messages` counts sent messages, so the sum over workers is the number of messages on the network.
`seconds` is the time during which at least one transfer of a kind was in progress; overlapping
transfers are not counted twice. A transfer lasts from its start until its wait returns; a logged
transfer also records when it completed, if that is observable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from threading import Lock
from time import perf_counter

from paceline.records import TRAFFIC_KINDS


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

    def complete(self, moment: float | None = None) -> None:
        """Record the completion time (default: now) unless it is already recorded."""
        if self.completed is None:
            self.completed = perf_counter() if moment is None else moment


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
    _lock: Lock = field(default_factory=Lock)

    def begin(
        self, kind: str, *, bytes_sent: int = 0, bytes_received: int = 0, messages: int = 0
    ) -> CountedTransfer:
        """Count a transfer that starts now; `end` must be called exactly once."""
        if kind not in self.counts:
            raise ValueError(f"unknown traffic kind {kind!r}: use {', '.join(TRAFFIC_KINDS)}")
        with self._lock:
            count, busy = self.counts[kind], self._in_progress[kind]
            count.bytes_sent += bytes_sent
            count.bytes_received += bytes_received
            count.messages += messages
            if busy.transfers == 0:
                busy.since = perf_counter()
            busy.transfers += 1
            if self.log is None:
                return self._unlogged[kind]
            transfer = CountedTransfer(kind, bytes_sent, bytes_received, messages, perf_counter())
            self.log.append(transfer)
            return transfer

    def end(self, transfer: CountedTransfer) -> None:
        if transfer.is_logged:
            transfer.complete()
        with self._lock:
            busy = self._in_progress[transfer.kind]
            busy.transfers -= 1
            if busy.transfers == 0:
                self.counts[transfer.kind].seconds += perf_counter() - busy.since

    def add_seconds(self, kind: str, seconds: float) -> None:
        """Add transfer time that was measured elsewhere, for example on a GPU."""
        with self._lock:
            self.counts[kind].seconds += seconds

    def to_dict(self) -> dict[str, dict[str, int | float]]:
        """Return the "traffic" entry of a worker in result.json; `restore` accepts it."""
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
