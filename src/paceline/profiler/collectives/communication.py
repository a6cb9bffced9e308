"""The communication of each rank, from the logs of all of them, for result.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.profiler.collectives.log import (
    BACKWARD,
    BUFFERS,
    ON_GPU,
    OPERATIONS,
    RankCollectives,
    Records,
    read_logs,
)
from paceline.profiler.collectives.waiting import (
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

    def account(
        self, worker: dict[str, Any], moments: Mapping[str, float], records: Records
    ) -> None:
        """Add it to the entry of the rank in `workers` of result.json.

        `moments` are the start, and the ends of the first step and of the last one, in the rank's
        clock. `records` are those of its log that count as communication.
        """
        rank, counted = self.log.rank, records
        start, first, last = moments["start"], moments["first"], moments["last"]
        records = records[(records["arrival"] >= start) & (records["arrival"] <= last)]
        waited = self.waits.waited[rank]
        for account, began in ((worker, start), (worker["after_first"], first)):
            exposed_seconds = account["phases"]["exchange"]
            _move_waits(account["phases"], waited, began, last)
            account["hidden_exchange_seconds"] = _overlapped(counted, began, last, exposed_seconds)
        worker["traffic"] = traffic(records)
        worker["collectives"] = collectives(records, worker["phases"])
        worker["last_arrivals"] = self.waits.last_arrivals[rank]
        worker["caused_wait_seconds"] = self.waits.caused_seconds[rank]
        if self.log.ddp:
            worker["ddp"] = [
                {key: value for key, value in model.items() if key not in ("event", "time")}
                for model in self.log.ddp
            ]


def _overlapped(records: Records, began: float, ended: float, exposed_seconds: float) -> float:
    """`exposed_seconds`: what the clock measured in phase exchange."""
    is_on_gpu = (records["flags"] & ON_GPU) != 0
    on_host, on_gpu = records[~is_on_gpu], records[is_on_gpu]
    busy, blocked = in_progress(on_host), exposed(on_host)
    either = union(
        np.concatenate([busy.began, blocked.began]), np.concatenate([busy.ended, blocked.ended])
    )
    blocked_seconds = blocked.within(began, ended)
    # What is in either but not blocked.
    overlapped = max(0.0, either.within(began, ended) - blocked_seconds)
    in_window = (on_gpu["arrival"] >= began) & (on_gpu["arrival"] <= ended)
    gpu_seconds = durations(on_gpu[in_window])
    return overlapped + max(0.0, gpu_seconds - max(0.0, exposed_seconds - blocked_seconds))


def _move_waits(phases: dict[str, float], waited: Intervals, began: float, ended: float) -> None:
    seconds = min(waited.within(began, ended), phases["exchange"])
    phases["exchange"] -= seconds
    phases["wait"] += seconds


@dataclass(frozen=True)
class Communication:
    ranks: dict[int, RankCommunication]
    mismatches: list[Mismatch]

    @property
    def logs(self) -> dict[int, RankCollectives]:
        return {rank: one.log for rank, one in self.ranks.items()}

    def warnings(self, world_size: int) -> list[str]:
        """What was not seen, or what ranks disagreed on."""
        texts = []
        if world_size > 1 and not any(len(rank.log.records) for rank in self.ranks.values()):
            texts.append(
                "no collective of torch.distributed was seen, so communication is part of other"
                " phases; paceline.join records its own run"
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


def durations(records: Records) -> float:
    """What the operations took in total, one after the other."""
    done = records[records["end"] > 0]
    return float((done["end"] - done["arrival"]).sum())


def collectives(records: Records, phases: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Number, bytes and seconds by operation; operations may be in progress at the same time.

    On a GPU, what is exposed is known of all operations together: each has its share.
    """
    is_on_gpu = (records["flags"] & ON_GPU) != 0
    gpu_seconds = durations(records[is_on_gpu])
    on_gpu = phases["exchange"] + phases["wait"] - exposed(records[~is_on_gpu]).seconds
    exposed_share = min(1.0, max(0.0, on_gpu) / gpu_seconds) if gpu_seconds else 0.0
    found = {}
    for code in np.unique(records["operation"]):
        is_own = records["operation"] == code
        on_host, own_gpu = records[is_own & ~is_on_gpu], durations(records[is_own & is_on_gpu])
        found[OPERATIONS[code]] = {
            "count": int(is_own.sum()),
            "bytes": int(records[is_own]["bytes"].sum()),
            "seconds": in_progress(on_host).seconds + own_gpu,
            "exposed_seconds": exposed(on_host).seconds + own_gpu * exposed_share,
        }
    return found
