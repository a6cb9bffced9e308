"""What each rank does when training stops: from the logs of the ranks and their stacks.

A rank that waits in a collective waits for the ranks that have not called it. If every rank has
called it, the calls differ, or the transfer itself does not end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.profiler.collectives.log import (
    ON_GPU,
    OPERATIONS,
    GroupInfo,
    RankCollectives,
    Records,
)
from paceline.profiler.collectives.waiting import MESSAGES, Mismatch, separate_waits
from paceline.profiler.post_mortem.process_facts import Stack, to_record

MISMATCHES_KEPT = 3
"""The first ones are the cause of the others."""


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """A collective that a rank has called and that has not ended."""

    operation: str
    group: str
    sequence: int
    bytes: int
    seconds: float
    """Since the call."""
    missing: tuple[int, ...]
    """Ranks that have not called it."""


@dataclass(slots=True)
class RankState:
    """One rank, when training stopped."""

    rank: int
    process: int | None = None
    pending: PendingCollective | None = None
    """The oldest."""
    stack: Stack = ()
    """Of the main thread."""
    ended: str | None = None
    """How the process ended; None if it runs."""
    exception: str | None = None

    def to_record(self) -> dict[str, Any]:
        pending = self.pending
        return {
            "rank": self.rank,
            "process": self.process,
            "ended": self.ended,
            "exception": self.exception,
            "collective": pending
            and {
                "operation": pending.operation,
                "group": pending.group,
                "sequence": pending.sequence,
                "bytes": pending.bytes,
                "seconds": round(pending.seconds, 3),
                "missing_ranks": list(pending.missing),
            },
            "line": next((str(frame) for frame in self.stack if frame.is_script), None),
            "stack": to_record(self.stack),
        }


@dataclass(frozen=True, slots=True)
class PostMortem:
    """Why training does not go on."""

    event: str
    """"hang" (no rank makes progress), "death" (a rank ended) or "stop" (the job was ended)."""
    time: float
    seconds: float
    """Since the last progress of any rank."""
    ranks: list[RankState]
    first: int | None = None
    """The rank that ended first."""
    mismatches: list[Mismatch] = field(default_factory=list)

    def to_record(self) -> dict[str, Any]:
        return {
            "event": self.event,
            "time": self.time,
            "seconds": round(self.seconds, 3),
            "first_rank": self.first,
            "ranks": [rank.to_record() for rank in self.ranks],
            "mismatches": [
                {
                    "group": mismatch.group.name,
                    "sequence": mismatch.sequence,
                    "calls": [
                        {"rank": rank, "operation": operation, "bytes": size, "root": root}
                        for rank, (operation, size, root) in sorted(mismatch.calls.items())
                    ],
                }
                for mismatch in self.mismatches[:MISMATCHES_KEPT]
            ],
        }


def find_pending(logs: Mapping[int, RankCollectives], now: float) -> dict[int, PendingCollective]:
    """The oldest unfinished collective of each rank. `now` is the time of day."""
    found = {}
    for rank, log in logs.items():
        for record in log.unfinished:
            if record["group"] >= len(log.groups):
                continue
            group, sequence = log.groups[record["group"]], int(record["sequence"])
            operation = OPERATIONS[record["operation"]]
            missing = missing_ranks(logs, log, record)
            if record["flags"] & ON_GPU and not missing:
                # The program only launched it, and notes its end with the next one.
                continue
            found[rank] = PendingCollective(
                operation,
                group.name,
                sequence,
                int(record["bytes"]),
                max(0.0, now - (float(record["arrival"]) + log.wall_offset)),
                missing,
            )
            break
    return found


def missing_ranks(
    logs: Mapping[int, RankCollectives], log: RankCollectives, record: Any
) -> tuple[int, ...]:
    """The ranks that have not called a collective which is recorded in `log`."""
    group, sequence, peer = log.groups[record["group"]], int(record["sequence"]), record["peer"]
    if OPERATIONS[record["operation"]] in MESSAGES:
        # Whether the other rank has called its part does not follow from sequence numbers alone.
        return (group.ranks[peer],) if 0 <= peer < len(group.ranks) else ()
    return tuple(rank for rank in group.ranks if _called(logs.get(rank), group) <= sequence)


def joined_records(logs: Mapping[int, RankCollectives], log: RankCollectives) -> Records:
    """The records of `log` without collectives that another rank never called.

    Nothing is transferred in those. What a rank without a log called is unknown.
    """
    is_message = np.isin(log.records["operation"], [OPERATIONS.index(name) for name in MESSAGES])
    is_joined = np.ones(len(log.records), bool)
    for index, group in enumerate(log.groups):
        # A rank that was killed while recording was paused may have called more.
        ranks = [rank for rank in group.ranks if rank in logs and not logs[rank].is_paused]
        called = min((_called(logs[rank], group) for rank in ranks), default=math.inf)
        is_own = (log.records["group"] == index) & ~is_message
        is_joined[is_own] = log.records["sequence"][is_own] < called
    joined: Records = log.records[is_joined]
    return joined


def _called(log: RankCollectives | None, group: GroupInfo) -> int:
    """How many collectives of a group a rank has called."""
    index = next((i for i, one in enumerate(log.groups) if one.key == group.key), -1) if log else -1
    if log is None or index < 0:
        return 0
    codes = [OPERATIONS.index(name) for name in MESSAGES]
    own = log.records[log.records["group"] == index]
    own = own[[code not in codes for code in own["operation"]]]
    noted = max((pause.known_calls.get(index, 0) for pause in log.pauses), default=0)
    return max(noted, int(own["sequence"].max()) + 1 if len(own) else 0)


def find_mismatches(logs: Mapping[int, RankCollectives]) -> list[Mismatch]:
    """Collectives that the ranks called differently, in the order of their numbers."""
    return sorted(separate_waits(logs).mismatches, key=lambda one: one.sequence) if logs else []


def add_resumption(
    report: dict[str, Any], logs: Sequence[RankCollectives], step_times: Sequence[float]
) -> None:
    """Say in a report about a hang how long it lasted, if progress followed.

    `step_times`: when ranks wrote steps. Times are those of day.
    """
    moments = np.concatenate(
        [
            np.asarray(step_times, np.float64),
            *(log.records[name] + log.wall_offset for log in logs for name in ("arrival", "end")),
        ]
    )
    later = moments[moments > report["time"]]
    if report["event"] == "hang" and len(later):
        began = report["time"] - report["seconds"]
        report["paused_seconds"] = round(float(later.min()) - began, 3)


def last_progress(logs: Sequence[RankCollectives]) -> float:
    """When a rank last called or ended a collective, as time of day; 0 if none did."""
    moments = [
        float(max(log.records["arrival"].max(), log.records["end"].max())) + log.wall_offset
        for log in logs
        if len(log.records)
    ]
    return max(moments, default=0.0)
