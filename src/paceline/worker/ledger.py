"""What a worker has measured of a run: in its earlier parts, where it was resumed, and since."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.measure.phase_clock import PhaseClock
from paceline.records import read_iteration_seconds, read_lines
from paceline.sync.replica import Replica
from paceline.worker.checkpoint import CheckpointStore
from paceline.worker.state import Account
from paceline.worker.steady import SteadyPhases


class Ledger:
    def __init__(self, clock: PhaseClock, replica: Replica, store: CheckpointStore | None) -> None:
        self._clock = clock
        self._replica = replica
        self._store = store
        self.steady = SteadyPhases(clock, replica)
        self._phases_before: dict[str, float] = {}
        self._iteration_seconds_before: Sequence[float] = ()

    def take_up(self, account: Account, events: Path, steps: range, iteration: int) -> None:
        """Go on from what the checkpoint of `iteration` holds, and `events` of these steps."""
        self._phases_before = account.get("phases", {})
        self._iteration_seconds_before = read_iteration_seconds(events, steps.stop, steps.start)
        self._replica.hidden_exchange_seconds = account.get("hidden_exchange_seconds", 0.0)
        if steps:
            self.steady.resume(account.get("after_first"))
        if "traffic" in account:
            self._replica.communicator.traffic.restore(account["traffic"])
        if self._store:
            blocked_seconds = _read_blocked_seconds(events, iteration)
            self._store.take_up(account.get("checkpoints", {}), iteration, blocked_seconds)

    def to_dict(self) -> Account:
        """As a checkpoint holds it."""
        return {
            "phases": self.phases,
            "traffic": self._replica.communicator.traffic.to_dict(),
            "hidden_exchange_seconds": self._replica.hidden_exchange_seconds,
            "checkpoints": self.checkpoints,
            "after_first": self.steady.to_dict(),
        }

    @property
    def phases(self) -> dict[str, float]:
        before = self._phases_before
        return {name: before.get(name, 0.0) + spent for name, spent in self._clock.seconds.items()}

    @property
    def seconds_before(self) -> float:
        """Wall time of the earlier parts."""
        return sum(self._phases_before.values())

    @property
    def iteration_seconds(self) -> list[float]:
        return [*self._iteration_seconds_before, *self._clock.lap_seconds]

    @property
    def checkpoints(self) -> dict[str, Any]:
        store = self._store
        return {
            "count": store.count if store else 0,
            "bytes": store.bytes if store else 0,
            "blocked_seconds": store.blocked_seconds if store else 0.0,
            "background_seconds": store.background_seconds if store else 0.0,
            "extra_memory_bytes": store.extra_memory_bytes if store else 0,
        }


def _read_blocked_seconds(path: Path, iteration: int) -> float:
    """How long training waited for the checkpoint of this iteration, by a rank's events."""
    waits = [
        event["blocked_seconds"]
        for event in read_lines(path)
        if event.get("event") == "checkpoint" and event["iteration"] == iteration
    ]
    return float(waits[-1]) if waits else 0.0
