"""Waiting, separated from transfer, from the logs of all ranks.

A collective cannot end before its last rank arrives. The time from a rank's own arrival to the last
one is therefore waiting for that rank, and the rest of the time is transfer. Logs are compared
after the ranks wrote them, so the program communicates nothing more than without the profiler.

All functions work on arrays: a log has up to millions of records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.profiler.collectives.intervals import Floats, Intervals, union
from paceline.profiler.collectives.log import (
    EXPOSED,
    ON_GPU,
    OPERATIONS,
    TRACED,
    GroupInfo,
    Pause,
    RankCollectives,
    Records,
)
from paceline.profiler.collectives.machine_clocks import ClockOffsets, measure_offsets
from paceline.profiler.collectives.sampling import of_ddp, sampling_of

Integers = npt.NDArray[np.int64]

ROOT_SENDS = ("broadcast", "scatter")
ROOT_RECEIVES = ("reduce", "gather")
MESSAGES = ("send", "recv")

TABLE = np.dtype(
    [
        ("group", "i8"),
        ("pair", "i8"),
        ("sequence", "i8"),
        ("rank", "i8"),
        ("operation", "i8"),
        ("bytes", "i8"),
        ("root", "i8"),
        ("is_root", "?"),
        ("exposed", "?"),
        ("on_gpu", "?"),
        ("traced", "?"),
        ("weight", "f8"),
        ("of_ddp", "?"),
        ("arrival", "f8"),
        ("end", "f8"),
        ("blocked_began", "f8"),
        ("blocked_ended", "f8"),
    ]
)
"""One row for each record of each rank, in the order of (group, pair, sequence, rank). `pair` is 0
for collectives, and identifies the sender and receiver of messages. `is_root`: for messages, the
sender. `weight`: how many collectives of its rank a row stands for. Times are in the clock of the
rank."""


@dataclass(frozen=True)
class Mismatch:
    """Ranks that called different operations, or the same one with different sizes or roots."""

    group: GroupInfo
    sequence: int
    calls: dict[int, tuple[str, int, int]]
    """Operation, bytes and root (-1 if there is none) by rank."""


@dataclass(frozen=True)
class Waits:
    """Who waited, and for whom."""

    waited: dict[int, Intervals]
    """By rank, in its own clock: the parts of its exposed communication that are waiting."""
    compared: dict[int, Intervals]
    """By rank, in its own clock: exposed communication in collectives that all ranks recorded."""
    missed: dict[int, Intervals]
    """By rank, in its own clock: from a record of a collective that another rank did not record,
    because it paused, to the next one that all ranks recorded."""
    waited_for: dict[int, dict[int, Intervals]]
    """By rank, in its own clock: the parts of `waited`, by the rank that came last."""
    last_arrivals: dict[int, int]
    """By rank: in how many collectives it was the last to arrive."""
    mismatches: list[Mismatch]
    offsets: ClockOffsets

    @property
    def caused_seconds(self) -> dict[int, float]:
        """By rank: how long the others waited for it in collectives that all ranks recorded."""
        found = dict.fromkeys(self.waited_for, 0.0)
        for parts in self.waited_for.values():
            for other, waited in parts.items():
                found[other] = found.get(other, 0.0) + waited.seconds
        return found


def separate_waits(logs: Mapping[int, RankCollectives]) -> Waits:
    """Compare the logs of all ranks of one start."""
    table, groups = _table(logs)
    begins = _segments(table)
    is_known = ~_has_pause(logs, table, begins, groups)
    is_complete = _is_complete(table, begins, groups) & is_known
    offsets = measure_offsets(logs, table, begins, is_complete)
    return _waits(logs, table, begins, groups, offsets, is_known)


def _table(logs: Mapping[int, RankCollectives]) -> tuple[npt.NDArray[Any], list[GroupInfo]]:
    numbers: dict[Any, int] = {}
    groups: list[GroupInfo] = []
    parts = []
    for rank, log in sorted(logs.items()):
        records = log.records[log.records["group"] < len(log.groups)]
        part = np.zeros(len(records), TABLE)
        for name in ("sequence", "operation", "bytes", "arrival", "end"):
            part[name] = records[name]
        for name in ("blocked_began", "blocked_ended"):
            part[name] = records[name]
        part["rank"], part["root"] = rank, records["peer"]
        part["exposed"] = (records["flags"] & EXPOSED) != 0
        part["on_gpu"] = (records["flags"] & ON_GPU) != 0
        part["traced"] = (records["flags"] & TRACED) != 0
        part["weight"] = sampling_of(log).weights_of(records)
        part["of_ddp"] = of_ddp(records)
        for index, group in enumerate(log.groups):
            if group.key not in numbers:
                numbers[group.key] = len(groups)
                groups.append(group)
            own = group.ranks.index(rank) if rank in group.ranks else -1
            rows = records["group"] == index
            part["group"][rows] = numbers[group.key]
            part["is_root"][rows] = records["peer"][rows] == own
            for operation in MESSAGES:
                messages = rows & (records["operation"] == OPERATIONS.index(operation))
                peers = records["peer"][messages].astype(np.int64)
                size = len(group.ranks)
                sends = operation == "send"
                part["pair"][messages] = 1 + (own * size + peers if sends else peers * size + own)
                part["is_root"][messages] = sends
        is_message = np.isin(records["operation"], [OPERATIONS.index(each) for each in MESSAGES])
        # The sender of a message from any source is not known.
        parts.append(part[~(is_message & (records["peer"] < 0))])
    table = np.concatenate(parts) if parts else np.zeros(0, TABLE)
    order = np.lexsort((table["rank"], table["sequence"], table["pair"], table["group"]))
    return table[order], groups


def _segments(table: npt.NDArray[Any]) -> Integers:
    """The first row of each collective."""
    if not len(table):
        return np.zeros(0, np.int64)
    keys = np.stack([table["group"], table["pair"], table["sequence"]])
    is_first = np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)])
    return np.flatnonzero(is_first)


def _is_complete(
    table: npt.NDArray[Any], begins: Integers, groups: Sequence[GroupInfo]
) -> npt.NDArray[np.bool_]:
    """Whether all ranks of each collective arrived."""
    sizes = np.array([len(group.ranks) for group in groups] or [0])
    lengths = np.diff(np.append(begins, len(table)))
    expected = np.where(table["pair"][begins] > 0, 2, sizes[table["group"][begins]])
    complete: npt.NDArray[np.bool_] = lengths == expected
    return complete


def _has_pause(
    logs: Mapping[int, RankCollectives],
    table: npt.NDArray[Any],
    begins: Integers,
    groups: Sequence[GroupInfo],
) -> npt.NDArray[np.bool_]:
    """Whether recording was paused on a rank of each collective when it called it."""
    found = np.zeros(len(begins), bool)
    numbers = {group.key: number for number, group in enumerate(groups)}
    sequences, own_group = table["sequence"][begins], table["group"][begins]
    for log in logs.values():
        for index, group in enumerate(log.groups if log.pauses else ()):
            pauses = [pause for pause in log.pauses if index in pause.calls]
            began = np.array([pause.calls[index] for pause in pauses], dtype=np.float64)
            ended = np.array([_calls_after(pause, index) for pause in pauses])
            rows = np.flatnonzero(own_group == numbers[group.key])
            at = np.searchsorted(began, sequences[rows], side="right") - 1
            if len(pauses):
                found[rows] |= (at >= 0) & (sequences[rows] < ended[np.maximum(at, 0)])
    return found


def _calls_after(pause: Pause, index: int) -> float:
    """The number of the first collective of a group after a pause."""
    return math.inf if pause.ended is None else pause.known_calls.get(index, math.inf)


def _waits(
    logs: Mapping[int, RankCollectives],
    table: npt.NDArray[Any],
    begins: Integers,
    groups: Sequence[GroupInfo],
    offsets: ClockOffsets,
    is_known: npt.NDArray[np.bool_],
) -> Waits:
    """`is_known`: the collectives that no rank called while recording was paused."""
    nothing = Intervals(np.zeros(0), np.zeros(0))
    waited, compared = dict.fromkeys(logs, nothing), dict.fromkeys(logs, nothing)
    missed = dict.fromkeys(logs, nothing)
    waited_for: dict[int, dict[int, Intervals]] = {rank: {} for rank in logs}
    last_arrivals = dict.fromkeys(logs, 0)
    if not len(table):
        return Waits(waited, compared, missed, waited_for, last_arrivals, [], offsets)
    lengths = np.diff(np.append(begins, len(table)))
    segment = np.repeat(np.arange(len(begins)), lengths)
    offset = offsets.at(table["rank"], table["arrival"])
    arrival = table["arrival"] + offset
    codes = {name: OPERATIONS.index(name) for name in OPERATIONS}
    operation = table["operation"]
    is_from_root = np.isin(operation, [codes[name] for name in (*ROOT_SENDS, *MESSAGES)])
    is_to_root = np.isin(operation, [codes[name] for name in ROOT_RECEIVES])
    # Of a broadcast, only the arrival of the root matters to the others.
    source_arrival = np.where(is_from_root & ~table["is_root"], -np.inf, arrival)
    needed = np.maximum.reduceat(source_arrival, begins)[segment]
    by_arrival = np.lexsort((source_arrival, segment))
    last_rank = table["rank"][by_arrival[begins + lengths - 1]]

    complete = _is_complete(table, begins, groups) & is_known
    weight = _compared_weights(table, is_known[segment])
    is_symmetric = complete & ~(is_from_root | is_to_root)[begins] & (lengths > 1)
    # Programs only launch those on a GPU, and which GPU came last is not known.
    is_symmetric &= ~np.logical_or.reduceat(table["on_gpu"], begins)
    last_rows = by_arrival[begins + lengths - 1][is_symmetric]
    for rank, times in _sums(table["rank"][last_rows], weight[last_rows]):
        last_arrivals[rank] = round(times)

    may_wait = table["exposed"] & ~(is_to_root & ~table["is_root"]) & np.isfinite(needed)
    began = np.maximum(table["arrival"], table["blocked_began"])
    ended = np.minimum(needed - offset, table["blocked_ended"])
    may_wait &= is_known[segment]
    for rank in logs:
        own = (table["rank"] == rank) & ~table["traced"]
        missed[rank] = _missed(table["arrival"][own], is_known[segment][own])
        compared[rank] = _blocked(table[own & is_known[segment] & table["exposed"]])
        rows = np.flatnonzero(own & may_wait & (ended > began))
        rows = rows[np.argsort(began[rows], kind="stable")]
        if not len(rows):
            continue
        # An interval counts where no earlier one does: DDP waits for several buckets at once.
        covered = np.concatenate([[-np.inf], np.maximum.accumulate(ended[rows])[:-1]])
        begin = np.maximum(began[rows], covered)
        keep = ended[rows] > begin
        waited[rank] = Intervals(begin[keep], ended[rows][keep])
        causes = last_rank[segment[rows]]
        for other in np.unique(causes[keep]).tolist():
            own_part = keep & (causes == other)
            waited_for[rank][other] = Intervals(begin[own_part], ended[rows][own_part])
    mismatches = _mismatches(table, begins, lengths, groups)
    return Waits(waited, compared, missed, waited_for, last_arrivals, mismatches, offsets)


def _missed(arrivals: Floats, is_known: npt.NDArray[np.bool_]) -> Intervals:
    order = np.argsort(arrivals, kind="stable")
    arrivals, is_missed = arrivals[order], ~is_known[order]
    changes = np.diff(np.concatenate([[False], is_missed, [False]]).astype(np.int8))
    ends = np.append(arrivals, math.inf)
    return Intervals(ends[changes > 0], ends[changes < 0])


def _compared_weights(table: npt.NDArray[Any], is_known: npt.NDArray[np.bool_]) -> Floats:
    """How many collectives of its rank each row stands for, if only rows that are known count."""
    weight: Floats = table["weight"].copy()
    for rank in np.unique(table["rank"]):
        rows = np.flatnonzero((table["rank"] == rank) & ~table["traced"] & table["of_ddp"])
        rows = rows[np.argsort(table["arrival"][rows], kind="stable")]
        known, own = is_known[rows], weight[rows]
        if not known.any():
            continue
        # Those that are known stand for the others up to the next ones, and the first ones for
        # what precedes them. Where the weight changes, this rank itself paused.
        begins = known & np.concatenate([[True], ~known[:-1] | (own[1:] != own[:-1])])
        block = np.maximum(np.cumsum(begins) - 1, 0)
        weight[rows] = (np.bincount(block, own) / np.bincount(block, known))[block]
    return weight


def _sums(keys: Integers, values: Floats) -> list[tuple[int, float]]:
    unique, inverse = np.unique(keys, return_inverse=True)
    return list(zip(unique.tolist(), np.bincount(inverse, values).tolist(), strict=True))


def _mismatches(
    table: npt.NDArray[Any], begins: Integers, lengths: Integers, groups: Sequence[GroupInfo]
) -> list[Mismatch]:
    differs = np.zeros(len(begins), bool)
    is_collective = table["pair"][begins] == 0
    for name in ("operation", "bytes", "root"):
        low = np.minimum.reduceat(table[name], begins)
        high = np.maximum.reduceat(table[name], begins)
        relevant = is_collective
        if name == "bytes":
            # Ranks may send different numbers of elements to each other.
            relevant = relevant & (table["operation"][begins] != OPERATIONS.index("all_to_all"))
        if name == "root":
            # The flight recorder does not have it.
            relevant = relevant & ~np.logical_or.reduceat(table["traced"], begins)
        differs |= relevant & (low != high)
    found = []
    for index in np.flatnonzero(differs):
        rows = table[begins[index] : begins[index] + lengths[index]]
        calls = {
            int(row["rank"]): (
                OPERATIONS[row["operation"]],
                int(row["bytes"]),
                int(row["root"]),
            )
            for row in rows
        }
        found.append(Mismatch(groups[rows[0]["group"]], int(rows[0]["sequence"]), calls))
    return found


def in_progress(records: Records) -> Intervals:
    """When at least one collective was in progress."""
    done = records[records["end"] > 0]
    return union(done["arrival"], done["end"])


def exposed(records: Records) -> Intervals:
    """When the program's thread was blocked on a collective."""
    return _blocked(records[(records["flags"] & EXPOSED) != 0])


def _blocked(blocked: npt.NDArray[Any]) -> Intervals:
    began = np.maximum(blocked["arrival"], blocked["blocked_began"])
    return union(began, np.maximum(began, blocked["blocked_ended"]))
