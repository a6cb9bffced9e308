"""The log of one rank's collectives: fixed-size records in a memory-mapped file.

Writing a record is a copy to memory, and the file keeps all of them if the process is killed: what
was in progress then is what has no end. Process groups and DDP models are described in a file of
JSON lines beside it.

The file grows up to `MAX_RECORDS`; from then on the oldest records are overwritten.
"""

from __future__ import annotations

import mmap
import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from struct import Struct
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.records import EventWriter, read_lines

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "barrier",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send",
    "recv",
)
"""A record holds the index."""

ASYNC, BACKWARD, FAILED, EXPOSED, BUFFERS, POLLED, ON_GPU, TRACED = 1, 2, 4, 8, 16, 32, 64, 128
"""Flags: the call did not wait for the operation; the autograd engine issued it; it raised an
exception; the program's thread was blocked from `blocked_began` to `blocked_ended`; DDP broadcasts
its buffers; it had ended some time before `end`; a GPU executed it, at a time after `arrival` that
is not known, but for the time between `arrival` and `end`; the flight recorder of PyTorch has it,
while recording was paused (paused_calls.py), without its root and its end."""

RECORD = np.dtype(
    [
        ("group", "<u2"),
        ("operation", "u1"),
        ("flags", "u1"),
        ("sequence", "<u4"),
        ("bytes", "<u8"),
        ("bytes_sent", "<u8"),
        ("bytes_received", "<u8"),
        ("peer", "<i4"),
        ("messages", "<u4"),
        ("arrival", "<f8"),
        ("end", "<f8"),
        ("blocked_began", "<f8"),
        ("blocked_ended", "<f8"),
    ]
)
"""`sequence` counts the collectives of a group, and for messages those between two ranks in one
direction. `bytes` is the whole tensor, as in docs/metrics.md; `bytes_sent`, `bytes_received` and
`messages` are what this rank transfers by the formulas of `paceline train`. `peer` is the root, or
the other rank of a message, as a rank of the group; -1 if there is none. Times are those of
`perf_counter`, 0 if unknown."""

_WHOLE = Struct("<HBBIQQQiIdddd")
_TIME = Struct("<d")
_BLOCKED = Struct("<dd")
_FLAGS_OFFSET, _ARRIVAL_OFFSET, _END_OFFSET, _BLOCKED_OFFSET = (
    RECORD.fields[name][1]  # type: ignore[index]  # the dtype has fields
    for name in ("flags", "arrival", "end", "blocked_began")
)
SIZE = RECORD.itemsize

FIRST_RECORDS = 4096
MAX_RECORDS = 1 << 22

Records = npt.NDArray[Any]
"""Array of dtype `RECORD`."""


class Counts(NamedTuple):
    """What one rank transfers in an operation."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    """Sent."""


class CollectiveLog:
    """Written by any thread that holds the GIL."""

    def __init__(self, folder: Path, rank: int, max_records: int = MAX_RECORDS) -> None:
        descriptor, self.path = _create(folder, rank)
        self._max_records = max_records
        self._capacity = min(FIRST_RECORDS, max_records)
        os.ftruncate(descriptor, self._capacity * SIZE)
        self._memory = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        self._next = count()
        self._descriptions = EventWriter(self.path.with_suffix(".jsonl"))
        self.describe(
            "process",
            rank=rank,
            process=os.getpid(),
            host=socket.gethostname(),
            machine=_boot_id(),
            perf_counter=perf_counter(),
        )

    def describe(self, event: str, **values: Any) -> None:
        self._descriptions.write(event, **values)

    def add(
        self,
        group: int,
        operation: int,
        flags: int,
        sequence: int,
        size_bytes: int,
        counts: Counts,
        peer: int,
        arrival: float,
    ) -> int:
        """Add an operation that begins; returns the position of its record."""
        number = next(self._next)
        if number >= self._capacity:
            number = self._make_room(number)
        position = number * SIZE
        _WHOLE.pack_into(
            self._memory,
            position,
            group,
            operation,
            flags,
            sequence & 0xFFFFFFFF,
            size_bytes,
            counts.bytes_sent,
            counts.bytes_received,
            peer,
            counts.messages,
            arrival,
            0.0,
            0.0,
            0.0,
        )
        return position

    def end(self, position: int, moment: float) -> None:
        _TIME.pack_into(self._memory, position + _END_OFFSET, moment)

    def ended(self, position: int) -> float:
        """The time of the end; 0 if it has not ended."""
        moment: float = _TIME.unpack_from(self._memory, position + _END_OFFSET)[0]
        return moment

    def arrival(self, position: int) -> float:
        moment: float = _TIME.unpack_from(self._memory, position + _ARRIVAL_OFFSET)[0]
        return moment

    def set_flag(self, position: int, flag: int) -> None:
        self._memory[position + _FLAGS_OFFSET] |= flag

    def has_flag(self, position: int, flag: int) -> bool:
        return bool(self._memory[position + _FLAGS_OFFSET] & flag)

    def block(self, position: int, began: float, ended: float) -> None:
        """The program's thread was blocked on the operation."""
        _BLOCKED.pack_into(self._memory, position + _BLOCKED_OFFSET, began, ended)
        self.set_flag(position, EXPOSED)

    def read(self) -> Records:
        """Return a copy of the records."""
        return _records_of(self._memory[:])

    def close(self) -> None:
        self._descriptions.close()
        self._memory.close()

    def _make_room(self, number: int) -> int:
        if self._capacity < self._max_records:
            self._capacity = min(2 * self._capacity, self._max_records)
            self._memory.resize(self._capacity * SIZE)
        return number % self._capacity


def _create(folder: Path, rank: int) -> tuple[int, Path]:
    """Create the next file of a rank: a restarted process keeps that of its predecessor."""
    for attempt in count():
        path = folder / f"collectives-{rank}-{attempt}.bin"
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), path
        except FileExistsError:
            continue
    raise AssertionError


def _boot_id() -> str:
    """Identifies machines: processes with the same one share the clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True)
class GroupInfo:
    """A process group, as one of its ranks sees it."""

    name: str
    incarnation: int
    """Counts groups of the same name, one after the other."""
    ranks: tuple[int, ...]
    backend: str

    @property
    def key(self) -> tuple[str, int, tuple[int, ...]]:
        """The same for all ranks of the group."""
        return self.name, self.incarnation, self.ranks


@dataclass
class Pause:
    """Steps whose collectives were not recorded (pauses.py)."""

    began: float
    updates: int
    """Steps of optimizers before it."""
    window_began: float
    """Of the steps that were recorded before it."""
    exchange_seconds: float
    """Total of phase exchange at `window_began`."""
    calls: dict[int, int]
    """By index of a group: how many of its collectives precede the pause."""
    window_updates: int = 0
    known_calls: dict[int, int] = field(default_factory=dict)
    """How many had been called when that was last noted: at the end, or when training stood
    still."""
    ended: float | None = None
    """None: the process was killed before the end."""
    updates_after: int | None = None


def _add_to_pauses(pauses: list[Pause], line: Mapping[str, Any]) -> None:
    calls = {int(index): number for index, number in line["calls"].items()}
    if line["event"] == "pause":
        pauses.append(
            Pause(
                line["moment"],
                line["updates"],
                line["window_began"],
                line["exchange"],
                calls,
                line["window_updates"],
            )
        )
    elif pauses:
        pauses[-1].known_calls.update(calls)
        if line["event"] == "resume":
            pauses[-1].ended, pauses[-1].updates_after = line["moment"], line["updates"]


@dataclass
class RankCollectives:
    """The log of one rank, as it was read."""

    rank: int
    attempt: int
    machine: str
    records: Records
    """In the order of arrival."""
    groups: list[GroupInfo] = field(default_factory=list)
    ddp: list[dict[str, Any]] = field(default_factory=list)
    """The last description of each DDP model."""
    pauses: list[Pause] = field(default_factory=list)
    """When nothing was recorded."""
    process: int = 0
    wall_offset: float = 0.0
    """Seconds to add to `perf_counter` to get the time of day."""

    @property
    def is_paused(self) -> bool:
        """Whether recording is paused, or was when the process was killed."""
        return bool(self.pauses) and self.pauses[-1].ended is None

    @property
    def unfinished(self) -> Records:
        """What is in progress, or was when the process ended."""
        is_failed = (self.records["flags"] & FAILED) != 0
        unfinished: Records = self.records[(self.records["end"] == 0) & ~is_failed]
        return unfinished


_NAME = re.compile(r"collectives-(\d+)-(\d+)\.bin")


def read_logs(folder: Path) -> Iterator[dict[int, RankCollectives]]:
    """Yield the logs by rank, for each start of the ranks. Works while they are being written."""
    attempts: dict[int, dict[int, RankCollectives]] = defaultdict(dict)
    for path in folder.glob("collectives-*.bin"):
        match = _NAME.fullmatch(path.name)
        if match:
            rank, attempt = int(match[1]), int(match[2])
            attempts[attempt][rank] = read_log(path, rank, attempt)
    for attempt in sorted(attempts):
        yield dict(sorted(attempts[attempt].items()))


def read_log(path: Path, rank: int, attempt: int = 0) -> RankCollectives:
    log = RankCollectives(rank, attempt, "", _refined(_records_of(path.read_bytes())))
    models: dict[int, dict[str, Any]] = {}
    for line in read_lines(path.with_suffix(".jsonl")):
        match line.get("event"):
            case "process":
                log.machine, log.process = line["machine"], line["process"]
                log.wall_offset = line["time"] - line["perf_counter"]
            case "group":
                log.groups.append(
                    GroupInfo(
                        line["name"], line["incarnation"], tuple(line["ranks"]), line["backend"]
                    )
                )
            case "ddp":
                models[line["model"]] = line
            case "pause" | "calls" | "resume":
                _add_to_pauses(log.pauses, line)
    log.ddp = list(models.values())
    return log


def _records_of(content: bytes) -> Records:
    """In the order of arrival."""
    records = np.frombuffer(content[: len(content) // SIZE * SIZE], RECORD)
    records = records[records["arrival"] > 0]
    ordered: Records = records[np.argsort(records["arrival"], kind="stable")]
    return ordered


def _refined(records: Records) -> Records:
    """Estimate when overlapped collectives ended, from similar ones whose end is known exactly."""
    is_done = records["end"] > 0
    is_polled = is_done & ((records["flags"] & POLLED) != 0)
    if not is_polled.any():
        return records
    records = records.copy()
    _, kinds = np.unique(records[["group", "operation", "bytes"]], return_inverse=True)
    for kind in np.unique(kinds[is_polled]):
        own = kinds == kind
        exact = records[own & is_done & ~is_polled]
        if len(exact):
            rows = own & is_polled
            typical = records["arrival"][rows] + np.median(exact["end"] - exact["arrival"])
            records["end"][rows] = np.minimum(records["end"][rows], typical)
    return records
