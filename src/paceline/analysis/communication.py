"""Traffic by kind, and the bandwidth of all-reduce that it implies.

    algorithm bandwidth    bytes / T
    bus bandwidth          algorithm bandwidth x 2 (P - 1) / P
    reference bandwidth    bytes log2(P) / T, from T = (bytes / bandwidth) log2(P)
    reference utilization  2 (P - 1) bytes / T / reference bandwidth

P is the number of workers, T the time of one all-reduce, and bytes the size of the reduced tensors.
With any bandwidth-optimal algorithm, P workers send 2 (P - 1) times that size in total, so the size
follows from the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.validation import is_number
from paceline.config import RunSettings
from paceline.errors import RecordsError
from paceline.records import TRAFFIC_KINDS, read_json
from paceline.strategies import ALL_REDUCE, STRATEGIES

ALL_REDUCE_STRATEGIES = STRATEGIES.tagged(ALL_REDUCE)


@dataclass(frozen=True, slots=True)
class KindTraffic:
    """Traffic of one kind, summed over the workers of a run, or the mean over runs."""

    bytes_sent: float
    bytes_per_iteration: float | None
    """None without iterations, or if the world size changed."""
    messages: float
    seconds: float
    """Time with a transfer of this kind in flight, maximum over ranks."""


def run_traffic(run: Run) -> dict[str, KindTraffic]:
    """Traffic by kind; kinds without traffic are omitted."""
    found = {}
    for kind in TRAFFIC_KINDS:
        counts = [worker.get("traffic", {}).get(kind, {}) for worker in run.workers]
        sent = sum(int(count.get("bytes_sent") or 0) for count in counts)
        messages = sum(int(count.get("messages") or 0) for count in counts)
        if sent or messages:
            seconds = max(float(count.get("seconds") or 0.0) for count in counts)
            is_known = run.iterations and not run.is_resized
            per_iteration = sent / run.iterations if is_known else None
            found[kind] = KindTraffic(sent, per_iteration, messages, seconds)
    return found


def group_traffic(group: RunGroup) -> dict[str, KindTraffic]:
    """Traffic by kind, mean over the finished runs."""
    runs = [run_traffic(run) for run in group.finished]
    found = {}
    for kind in TRAFFIC_KINDS:
        own = [traffic.get(kind, KindTraffic(0, 0.0, 0, 0.0)) for traffic in runs]
        if any(kind in traffic for traffic in runs):
            rates = [one.bytes_per_iteration for one in own]
            known = [rate for rate in rates if rate is not None]
            found[kind] = KindTraffic(
                fmean(one.bytes_sent for one in own),
                fmean(known) if len(known) == len(rates) else None,
                fmean(one.messages for one in own),
                fmean(one.seconds for one in own),
            )
    return found


@dataclass(frozen=True, slots=True)
class BucketChoice:
    """The gradient buckets of `overlap` in the first finished run of a configuration."""

    label: str
    count: int
    bucket_bytes: float
    """The size at which a bucket is full."""
    reason: str
    backward_seconds: float | None
    latency_seconds: float | None
    bytes_per_second: float | None
    """All-reduced after the backward pass."""
    overlapped_bytes_per_second: float | None
    """All-reduced during the backward pass; this and the three above are None if not measured."""


def bucket_choice(group: RunGroup) -> BucketChoice | None:
    """None if the strategy has no buckets, or did not record them."""
    workers = group.finished[0].workers if group.finished else []
    found = workers[0].get("buckets") if workers else None
    if found is None:
        return None
    measured = found.get("measurements") or {}
    rates = (measured.get("seconds_per_byte"), measured.get("overlapped_seconds_per_byte"))
    alone, overlapped = (1 / seconds if seconds else None for seconds in rates)
    return BucketChoice(
        group.label,
        found["count"],
        found["bucket_mib"] * 2**20,
        found["reason"],
        measured.get("backward_seconds"),
        measured.get("latency_seconds"),
        alone,
        overlapped,
    )


@dataclass(frozen=True, slots=True)
class AllReduceBandwidth:
    label: str
    workers: int
    bytes: float
    """Reduced in one iteration."""
    seconds: float
    """Time with transfers of gradients in flight in one iteration, minimum over ranks."""
    link_bytes_per_second: float | None
    """Measured in the emulated cluster, or by `paceline comm` with the same number of workers."""

    @property
    def algorithm_bandwidth(self) -> float:
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        return self.algorithm_bandwidth * 2 * (self.workers - 1) / self.workers

    @property
    def reference_bandwidth(self) -> float:
        return self.algorithm_bandwidth * math.log2(self.workers)

    @property
    def reference_utilization(self) -> float:
        return 2 * (self.workers - 1) * self.bytes / self.seconds / self.reference_bandwidth

    @property
    def link_share(self) -> float | None:
        link = self.link_bytes_per_second
        return self.bus_bandwidth / link if link else None


def all_reduce_bandwidth(
    group: RunGroup, measured: Sequence[CommMeasurement] = ()
) -> AllReduceBandwidth | None:
    """Mean over the finished runs.

    None if the strategy does not all-reduce plain gradients, if transfers were not timed, or if the
    world size changed, because then the traffic mixes all-reduces of different sizes.
    """
    if not group.finished or group.workers < 2 or not _sends_plain_gradients(group.settings):
        return None
    workers = group.workers
    sums = [_gradient_bytes_and_seconds(run, workers) for run in group.finished]
    known = [one for one in sums if one is not None]
    if len(known) < len(sums):
        return None
    return AllReduceBandwidth(
        group.label,
        workers,
        fmean(size for size, _ in known),
        fmean(seconds for _, seconds in known),
        link_bytes_per_second(group.finished[0]) or measured_bandwidth_limit(measured, workers),
    )


def _gradient_bytes_and_seconds(run: Run, workers: int) -> tuple[float, float] | None:
    """Bytes reduced per iteration, and the seconds of the rank that waits least."""
    counts = [worker.get("traffic", {}).get("gradients", {}) for worker in run.workers]
    sent = sum(count.get("bytes_sent") or 0 for count in counts)
    seconds = [count.get("seconds") or 0.0 for count in counts]
    is_timed = run.iterations and min(seconds, default=0.0) > 0
    if not sent or not is_timed or run.is_resized:
        return None
    return sent / (2 * (workers - 1)) / run.iterations, min(seconds) / run.iterations


def _sends_plain_gradients(settings: RunSettings) -> bool:
    """A codec sends compressed gradients, and shared memory sends nothing."""
    plain = settings.options.get("codec", "none") == "none"
    is_torch = settings.get("communicator") == "torch"
    return settings.strategy in ALL_REDUCE_STRATEGIES and is_torch and plain


def link_bytes_per_second(run: Run) -> float | None:
    """The slowest measured link of the emulated cluster; None outside of one."""
    cluster = (run.result or {}).get("cluster")
    found = cluster.get("got") if isinstance(cluster, dict) else None
    rates = [rate for item in found or () if (rate := _link_rate(item)) is not None]
    return min(rates, default=None)


def _link_rate(item: Any) -> float | None:
    if not isinstance(item, dict) or not str(item.get("what", "")).startswith("bandwidth"):
        return None
    got = item.get("got")
    return got / 8 if is_number(got) and item.get("unit") == "bit/s" else None


@dataclass(frozen=True, slots=True)
class CommMeasurement:
    """One measurement of `paceline comm`; docs/metrics.md defines the figures."""

    workers: int
    operation: str
    """With its communicator and algorithm."""
    bytes: int
    seconds: float
    """The median."""
    algorithm_bandwidth: float
    bus_bandwidth: float
    limit_share: float | None


def read_comm_measurements(path: Path) -> list[CommMeasurement]:
    """The measurements of a `paceline comm` record; empty if it is damaged or not such a record."""
    try:
        record = read_json(path)
        return [_measurement(record["workers"], one) for one in record["measurements"]]
    except (RecordsError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return []


def _measurement(workers: int, one: dict[str, Any]) -> CommMeasurement:
    names = (one.get(key) for key in ("operation", "communicator", "algorithm"))
    share = one.get("share_of_limit")
    return CommMeasurement(
        int(workers),
        ", ".join(str(name) for name in names if name),
        int(one["bytes"]),
        float(one["seconds"]["median"]),
        float(one["algorithm_bytes_per_second"]),
        float(one["bus_bytes_per_second"]),
        share if is_number(share) else None,
    )


def measured_bandwidth_limit(measured: Sequence[CommMeasurement], workers: int) -> float | None:
    """The bandwidth limit that `paceline comm` found with this number of workers."""
    limits = [
        one.bus_bandwidth / one.limit_share
        for one in measured
        if one.workers == workers and one.limit_share
    ]
    return max(limits, default=None)
