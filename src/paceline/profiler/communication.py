"""The communication of each rank, from the logs of all of them, for result.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.profiler.collective_log import (
    BACKWARD,
    BUFFERS,
    OPERATIONS,
    RankCollectives,
    Records,
    read_logs,
)
from paceline.profiler.waiting import (
    Intervals,
    Mismatch,
    Waits,
    exposed,
    in_progress,
    separate_waits,
    union,
)
from paceline.records import TRAFFIC_KINDS, RunFolder

SMALL_BYTES = 1024
"""A program does not say what its tensors are: up to this size, they count as metrics."""

MISMATCHES_SHOWN = 3


@dataclass(frozen=True)
class RankCommunication:
    """What one rank exchanged."""

    log: RankCollectives
    waits: Waits

    def account(self, worker: dict[str, Any], moments: Mapping[str, float]) -> None:
        """Add it to the entry of the rank in `workers` of result.json.

        `moments` are the start, and the ends of the first step and of the last one, in the rank's
        clock.
        """
        rank, records = self.log.rank, self.log.records
        start, first, last = moments["start"], moments["first"], moments["last"]
        records = records[(records["arrival"] >= start) & (records["arrival"] <= last)]
        waited = self.waits.waited[rank]
        for account, began in ((worker, start), (worker["after_first"], first)):
            _move_waits(account["phases"], waited, began, last)
            account["hidden_exchange_seconds"] = self._overlapped(began, last)
        worker["traffic"] = traffic(records)
        worker["collectives"] = collectives(records)
        worker["last_arrivals"] = self.waits.last_arrivals[rank]
        worker["caused_wait_seconds"] = self.waits.caused_seconds[rank]
        if self.log.ddp:
            worker["ddp"] = [
                {key: value for key, value in model.items() if key not in ("event", "time")}
                for model in self.log.ddp
            ]

    def _overlapped(self, began: float, ended: float) -> float:
        busy, blocked = in_progress(self.log.records), exposed(self.log.records)
        either = union(
            np.concatenate([busy.began, blocked.began]), np.concatenate([busy.ended, blocked.ended])
        )
        # What is in either but not blocked.
        return max(0.0, either.within(began, ended) - blocked.within(began, ended))


def _move_waits(phases: dict[str, float], waited: Intervals, began: float, ended: float) -> None:
    seconds = min(waited.within(began, ended), phases["exchange"])
    phases["exchange"] -= seconds
    phases["wait"] += seconds


@dataclass(frozen=True)
class Communication:
    ranks: dict[int, RankCommunication]
    mismatches: list[Mismatch]

    def warnings(self, world_size: int) -> list[str]:
        """What was not seen, or what ranks disagreed on."""
        texts = []
        if world_size > 1 and not any(len(rank.log.records) for rank in self.ranks.values()):
            texts.append(
                "no collective of torch.distributed was seen: communication by other means, such as"
                " paceline.join, is not measured, and its time is part of other phases"
            )
        for mismatch in self.mismatches[:MISMATCHES_SHOWN]:
            calls = ", ".join(
                f"rank {rank} {name} of {size} bytes"
                for rank, (name, size, _) in sorted(mismatch.calls.items())
            )
            texts.append(
                f"collective {mismatch.sequence} of group {mismatch.group.name} differs: {calls}"
            )
        more = len(self.mismatches) - MISMATCHES_SHOWN
        if more > 0:
            texts.append(f"{more} more collectives differ between ranks")
        return texts


def read_communication(folder: RunFolder) -> Communication:
    """Compare the logs of the last start of the ranks."""
    *_, logs = {}, *read_logs(folder.path)
    waits = separate_waits(logs)
    ranks = {rank: RankCommunication(log, waits) for rank, log in logs.items()}
    return Communication(ranks, waits.mismatches)


def traffic(records: Records) -> dict[str, dict[str, float]]:
    """Bytes, messages and seconds by kind."""
    kinds = traffic_kinds(records)
    seconds = np.where(records["end"] > 0, records["end"] - records["arrival"], 0.0)
    return {
        kind: {
            "bytes_sent": int(records["bytes_sent"][kinds == kind].sum()),
            "bytes_received": int(records["bytes_received"][kinds == kind].sum()),
            "messages": int(records["messages"][kinds == kind].sum()),
            "seconds": float(seconds[kinds == kind].sum()),
        }
        for kind in TRAFFIC_KINDS
    }


def traffic_kinds(records: Records) -> npt.NDArray[np.str_]:
    """The kind of each record, as far as operations tell what they are for."""
    names = np.array(OPERATIONS)[records["operation"]]
    is_reduction = np.isin(names, ("all_reduce", "reduce_scatter", "reduce"))
    in_backward = (records["flags"] & BACKWARD) != 0
    kinds = np.where(is_reduction, "gradients", "parameters")
    kinds[(records["bytes"] <= SMALL_BYTES) & ~in_backward] = "metrics"
    kinds[(records["flags"] & BUFFERS) != 0] = "buffers"
    kinds[names == "barrier"] = "control"
    return kinds


def collectives(records: Records) -> dict[str, dict[str, float]]:
    """Number, bytes and seconds by operation; operations may be in progress at the same time."""
    found = {}
    for code in np.unique(records["operation"]):
        own = records[records["operation"] == code]
        found[OPERATIONS[code]] = {
            "count": len(own),
            "bytes": int(own["bytes"].sum()),
            "seconds": in_progress(own).seconds,
            "exposed_seconds": exposed(own).seconds,
        }
    return found
