"""What a rank did after its last record, if training did not end by itself.

A rank records its time when a step ends. One that hangs and is killed leaves a gap up to its end,
and one that DDP makes wait for a rank which never comes records that as its backward pass. Its
collectives are in a memory-mapped file, so that file tells both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.profiler.collectives.intervals import Intervals
from paceline.profiler.collectives.log import BACKWARD, EXPOSED, OPERATIONS, RankCollectives
from paceline.profiler.collectives.waiting import MESSAGES
from paceline.profiler.post_mortem.examination import missing_ranks


@dataclass(frozen=True, slots=True)
class LastWait:
    """The wait of a rank for others that never called the same collective."""

    began: float
    ended: float | None
    """None: it lasted until the end of the process. Times are in the clock of the rank."""
    recorded_as: str | None
    """The phase of the part that the rank recorded; None if it recorded none."""


def find_last_wait(logs: Mapping[int, RankCollectives], rank: int) -> LastWait | None:
    """The last collective of a rank, if it is one that other ranks did not call."""
    log = logs.get(rank)
    if log is None or not len(log.records):
        return None
    last = log.records[-1]
    missing = missing_ranks(logs, log, last) if last["group"] < len(log.groups) else ()
    if last["end"]:
        # What a rank called while recording was paused is not known to its end.
        missing = tuple(each for each in missing if each not in logs or not logs[each].is_paused)
    if not missing:
        return None
    if OPERATIONS[last["operation"]] in MESSAGES and last["end"]:
        return None
    flags, ended = int(last["flags"]), float(last["end"])
    # DDP waits for all buckets after the last one: it is not before the arrival of that.
    began = max(float(last["arrival"]), float(last["blocked_began"]))
    recorded_as = "exchange" if flags & EXPOSED else "backward" if flags & BACKWARD else None
    return LastWait(began, ended or None, recorded_as)


def add_last_interval(
    worker: dict[str, Any],
    recorded_until: float,
    ended: float,
    wait: LastWait | None,
    waited: Intervals | None,
) -> None:
    """Add the time of a rank up to the end of its process to its entry in `workers`.

    `waited` are the waits that its phases have already. Times are in the clock of the rank.
    """
    phases, in_steps = worker["phases"], worker["after_first"]["phases"]
    unrecorded = max(0.0, ended - recorded_until)
    waiting = 0.0
    if wait is not None:
        until = ended if wait.ended is None else min(wait.ended, ended)
        if wait.recorded_as is not None and wait.began < min(until, recorded_until):
            recorded = min(until, recorded_until) - wait.began
            if waited is not None:
                recorded -= waited.within(wait.began, min(until, recorded_until))
            moved = min(recorded, phases[wait.recorded_as])
            phases[wait.recorded_as] -= moved
            phases["wait"] += moved
            # It is not part of a step that ended.
            in_steps[wait.recorded_as] -= min(moved, in_steps[wait.recorded_as])
        waiting = max(0.0, until - max(wait.began, recorded_until))
    phases["wait"] += waiting
    phases["other"] += unrecorded - waiting
    worker["wall_seconds"] += unrecorded
    worker["unrecorded_seconds"] = unrecorded
