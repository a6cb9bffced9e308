"""The traffic counter: what a worker sent and received, by kind.

`messages` are those sent, so that the sum over the workers is what went over the wire. `seconds` is
the time during which at least one transfer of the kind was under way: transfers that overlap are
not counted twice. A transfer begins when it is started and ends when somebody has waited for it;
one that is logged also notes when it was complete, where that can be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from threading import Lock
from time import perf_counter

from paceline.records import TRAFFIC_KINDS


@dataclass(slots=True)
class Count:
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class CountedTransfer:
    """One of those that are counted; without more than its kind where nobody wants them logged."""

    kind: str
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    began: float = 0.0
    is_logged: bool = True
    completed: float | None = None

    def complete(self, moment: float | None = None) -> None:
        """Note the moment, now unless given, if none was noted before."""
        if self.completed is None:
            self.completed = perf_counter() if moment is None else moment


@dataclass(slots=True)
class _Underway:
    transfers: int = 0
    since: float = 0.0


@dataclass(slots=True)
class Traffic:
    """The counts of one worker; safe to use from several threads."""

    counts: dict[str, Count] = field(
        default_factory=lambda: {kind: Count() for kind in TRAFFIC_KINDS}
    )
    log: list[CountedTransfer] | None = None
    """Where transfers are noted one by one, while somebody wants them."""
    _underway: dict[str, _Underway] = field(
        default_factory=lambda: {kind: _Underway() for kind in TRAFFIC_KINDS}
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
        """Count a transfer that starts now; `end` must follow, once."""
        if kind not in self.counts:
            raise ValueError(f"unknown kind of traffic {kind!r}: use {', '.join(TRAFFIC_KINDS)}")
        with self._lock:
            count, underway = self.counts[kind], self._underway[kind]
            count.bytes_sent += bytes_sent
            count.bytes_received += bytes_received
            count.messages += messages
            if underway.transfers == 0:
                underway.since = perf_counter()
            underway.transfers += 1
            if self.log is None:
                return self._unlogged[kind]
            transfer = CountedTransfer(kind, bytes_sent, bytes_received, messages, perf_counter())
            self.log.append(transfer)
            return transfer

    def end(self, transfer: CountedTransfer) -> None:
        if transfer.is_logged:
            transfer.complete()
        with self._lock:
            underway = self._underway[transfer.kind]
            underway.transfers -= 1
            if underway.transfers == 0:
                self.counts[transfer.kind].seconds += perf_counter() - underway.since

    def add_seconds(self, kind: str, seconds: float) -> None:
        """Count the time of transfers that was measured elsewhere, as on a GPU."""
        with self._lock:
            self.counts[kind].seconds += seconds

    def to_dict(self) -> dict[str, dict[str, int | float]]:
        """The "traffic" of a worker in result.json; `restore` takes it back."""
        with self._lock:
            return {kind: asdict(count) for kind, count in self.counts.items()}

    def restore(self, state: Mapping[str, Mapping[str, int | float]]) -> None:
        """Go on from what an earlier part of the same run had counted."""
        with self._lock:
            for kind, values in state.items():
                self.counts[kind] = Count(
                    bytes_sent=int(values["bytes_sent"]),
                    bytes_received=int(values["bytes_received"]),
                    messages=int(values["messages"]),
                    seconds=float(values["seconds"]),
                )
