"""Collectives that never ended, because not every rank called them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.profiler.collective_log import (
    ASYNC,
    OPERATIONS,
    GroupInfo,
    RankCollectives,
    Records,
)

MESSAGES = tuple(OPERATIONS.index(name) for name in ("send", "recv"))


@dataclass(frozen=True)
class Unfinished:
    """A collective that some ranks of a group wait in, and others have not reached."""

    group: GroupInfo
    sequence: int
    operation: str
    size_bytes: int
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    last_of_missing: dict[int, str]
    """By rank: what it called last in the group."""

    def __str__(self) -> str:
        calls = ", ".join(
            f"{_ranks((rank,))} called {call} last" for rank, call in self.last_of_missing.items()
        )
        return (
            f"{_ranks(self.waiting)} waited in {self.operation} {self.sequence} of group"
            f" {self.group.name} ({self.size_bytes} bytes) for {_ranks(self.missing)}: {calls}"
        )


def find_unfinished(logs: Mapping[int, RankCollectives]) -> list[Unfinished]:
    """The first collective of each group that not all ranks reached."""
    found = []
    groups = {group.key: group for log in logs.values() for group in log.groups}
    for group in groups.values():
        own = {rank: _of_group(logs[rank], group) for rank in group.ranks if rank in logs}
        waiting = {
            rank: records[records["end"] == 0]
            for rank, records in own.items()
            if len(records) and (records["end"] == 0).any()
        }
        if not waiting:
            continue
        sequence = min(int(records["sequence"].min()) for records in waiting.values())
        missing = tuple(
            rank
            for rank in group.ranks
            if rank not in own or not (own[rank]["sequence"] == sequence).any()
        )
        in_it = tuple(
            rank for rank, records in waiting.items() if (records["sequence"] == sequence).any()
        )
        if not missing:
            continue
        records = waiting[in_it[0]]
        call = records[records["sequence"] == sequence][0]
        last = {rank: _describe_last(own.get(rank)) for rank in missing}
        operation, size_bytes = OPERATIONS[call["operation"]], int(call["bytes"])
        found.append(Unfinished(group, sequence, operation, size_bytes, in_it, missing, last))
    return found


def _of_group(log: RankCollectives, group: GroupInfo) -> Records:
    """The collectives of a group, without messages."""
    index = next((number for number, one in enumerate(log.groups) if one.key == group.key), -1)
    records = log.records
    own: Records = records[(records["group"] == index) & ~np.isin(records["operation"], MESSAGES)]
    return own


def _describe_last(records: Records | None) -> str:
    if records is None or not len(records):
        return "nothing"
    last = records[-1]
    kind = "asynchronous " if last["flags"] & ASYNC else ""
    return f"{kind}{OPERATIONS[last['operation']]} {last['sequence']}"


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
