"""The communication of each rank, from the logs of all of them, for result.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.profiler.collectives.estimated_waits import EstimatedWaits, estimate_waits
from paceline.profiler.collectives.intervals import Intervals, union
from paceline.profiler.collectives.log import (
    BACKWARD,
    BUFFERS,
    ON_GPU,
    OPERATIONS,
    RankCollectives,
    Records,
    read_logs,
)
from paceline.profiler.collectives.sampling import (
    Sampling,
    recorded,
    sampling_of,
    skipped_steps,
)
from paceline.profiler.collectives.waiting import (
    Mismatch,
    Waits,
    exposed,
    in_progress,
    separate_waits,
)
from paceline.records import TRAFFIC_KINDS, RunFolder

SMALL_BYTES = 1024
"""A program does not say what its tensors are: up to this size, they count as metrics."""

MISMATCHES_SHOWN = 3

EVERYTHING = Sampling()
"""Nothing was left out."""


@dataclass(frozen=True)
class RankCommunication:
    """What one rank exchanged."""

    log: RankCollectives
    waits: Waits

    def account(
        self,
        worker: dict[str, Any],
        moments: Mapping[str, float],
        records: Records,
        interruptions: Sequence[Sequence[float]] = (),
    ) -> dict[int, float]:
        """Add it to the entry of the rank in `workers` of result.json.

        `moments` are the start, and the ends of the first step and of the last one, in the rank's
        clock. `records` are those of its log that count as communication. In `interruptions`,
        communication is part of evaluation or of a checkpoint. Returns how long the rank waited for
        each of the others.
        """
        rank, counted = self.log.rank, recorded(records)
        start, first, last = moments["start"], moments["first"], moments["last"]
        records = counted[(counted["arrival"] >= start) & (counted["arrival"] <= last)]
        sampling = sampling_of(self.log, last)
        exchange_seconds = worker["phases"]["exchange"]
        waited = self.waits.waited[rank].without(interruptions)
        estimate = estimate_waits(
            self.log, self.waits, records, exchange_seconds, last, interruptions
        )
        for account, began in ((worker, start), (worker["after_first"], first)):
            exposed_seconds = account["phases"]["exchange"]
            _move_waits(account["phases"], waited, began, last, estimate)
            account["hidden_exchange_seconds"] = sum(
                weight * _overlapped(part, began, last, exposed_seconds)
                for part, weight in sampling.parts(counted)
            )
        worker["traffic"] = traffic(records, sampling)
        worker["collectives"] = collectives(records, worker["phases"], sampling)
        if self.log.pauses:
            steps = int(worker["after_first"]["iterations"]) + 1
            recorded_steps = max(0, steps - skipped_steps(self.log, steps))
            worker["collectives_recorded"] = {"steps": recorded_steps, "of": steps}
        worker["last_arrivals"] = self.waits.last_arrivals[rank]
        if self.log.ddp:
            worker["ddp"] = [
                {key: value for key, value in model.items() if key not in ("event", "time")}
                for model in self.log.ddp
            ]
        return self._caused_waits(estimate, worker["phases"]["wait"], interruptions)

    def _caused_waits(
        self,
        estimate: EstimatedWaits,
        wait_seconds: float,
        interruptions: Sequence[Sequence[float]],
    ) -> dict[int, float]:
        waited_for = self.waits.waited_for[self.log.rank]
        if math.isinf(estimate.since):
            return {other: waited.seconds for other, waited in waited_for.items()}
        caused = {
            other: waited.without(interruptions).within(-math.inf, estimate.since)
            + estimate.caused[other]
            for other, waited in waited_for.items()
        }
        # What the clock took for waiting in a pause has no cause.
        scale = wait_seconds / (sum(caused.values()) or 1.0)
        return {other: scale * seconds for other, seconds in caused.items()}


def _move_waits(
    phases: dict[str, float],
    waited: Intervals,
    began: float,
    ended: float,
    estimate: EstimatedWaits,
) -> None:
    seconds = estimate.seconds + waited.within(began, max(began, min(ended, estimate.since)))
    seconds = min(seconds, phases["exchange"])
    phases["exchange"] -= seconds
    phases["wait"] += seconds


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


def traffic(records: Records, sampling: Sampling = EVERYTHING) -> dict[str, dict[str, float]]:
    """Bytes, messages and seconds by kind."""
    parts = [(one, traffic_kinds(one), weight) for one, weight in sampling.parts(records)]
    found: dict[str, dict[str, float]] = {}
    for kind in TRAFFIC_KINDS:
        own = [(one[kinds == kind], weight) for one, kinds, weight in parts]
        found[kind] = {
            name: round(sum(weight * int(one[name].sum()) for one, weight in own))
            for name in ("bytes_sent", "bytes_received", "messages")
        }
        found[kind]["seconds"] = sum(weight * durations(one) for one, weight in own)
    return found


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


def collectives(
    records: Records, phases: Mapping[str, float], sampling: Sampling = EVERYTHING
) -> dict[str, dict[str, float]]:
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
        own_gpu = durations(records[is_own & is_on_gpu])
        parts = sampling.parts(records[is_own])
        on_host = sampling.parts(records[is_own & ~is_on_gpu])
        found[OPERATIONS[code]] = {
            "count": round(sum(weight * len(one) for one, weight in parts)),
            "bytes": round(sum(weight * int(one["bytes"].sum()) for one, weight in parts)),
            "seconds": sum(weight * in_progress(one).seconds for one, weight in on_host) + own_gpu,
            "exposed_seconds": sum(weight * exposed(one).seconds for one, weight in on_host)
            + own_gpu * exposed_share,
        }
    if sampling.began < np.inf:
        # In pauses, the phases know better how long collectives blocked the program.
        known = phases["exchange"] + phases["wait"]
        estimated = sum(one["exposed_seconds"] for one in found.values())
        for one in found.values():
            one["exposed_seconds"] *= known / estimated if estimated else 0.0
    return found
