"""What the bus bandwidth is held against: the link between machines, or the memory of one.

The record of a measurement, as `--json` writes it and report/ reads it.

    schema            1
    kind              "comm"
    time              Unix time of the end
    software, hardware   of the first machine, as in result.json
    workers, nodes    how many
    tensors           where they were: main memory, own GPUs (one for each worker of a machine, and
                      NCCL between them) or shared GPUs (by way of main memory)
    plan              what was asked (commbench/spec.py)
    cluster           the emulated cluster that this was in, as in result.json; null outside of one
    limits            link and memory: bytes_per_second, source; null where nothing is known
    measurements      one for each operation, communicator, algorithm and size:
                      bytes, repeats, operations_per_repeat, samples_seconds,
                      seconds {mean, median, p95, least},
                      algorithm_bytes_per_second, bus_bytes_per_second, share_of_limit
    fits              one for each operation, communicator and algorithm with two sizes or more,
                      whose times clearly rise with the size:
                      latency_seconds, bus_bytes_per_second, each also with _error (null with two
                      sizes); share_of_limit
    left_out          sizes that would have taken too long, by way

docs/metrics.md defines the figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.comm.rank_info import RankInfo
from paceline.commbench.fit import Point, fit
from paceline.commbench.spec import BUS_FACTORS, BenchmarkSpec, Case
from paceline.measure.machine import hardware, software
from paceline.records import SCHEMA

if TYPE_CHECKING:
    from paceline.commbench.runner import CaseTiming


@dataclass(frozen=True, slots=True)
class Limit:
    kind: str
    """link or memory."""
    bytes_per_second: float
    source: str
    """Where the figure comes from, in a few words."""


def link_limit(plan: BenchmarkSpec, cluster: dict[str, Any] | None) -> Limit | None:
    """By --link, or else as the emulated cluster was measured to be (emulation/state.py)."""
    if plan.link_bits_per_second is not None:
        return Limit("link", plan.link_bits_per_second / 8, "as --link says")
    if cluster is None:
        return None
    got = [item["got"] for item in cluster["got"] if item["what"].startswith("bandwidth")]
    if got:
        return Limit("link", min(got) / 8, "as calibrated, the slowest link")
    asked = _asked(cluster["asked"] or {})
    return Limit("link", min(asked) / 8, "as asked of the emulated cluster") if asked else None


def _asked(spec: dict[str, Any]) -> list[float]:
    rates = [spec.get("bandwidth_bits_per_second"), *spec.get("bandwidth_of", {}).values()]
    return [rate for rate in rates if rate is not None]


Record = dict[str, Any]


def make_record(
    plan: BenchmarkSpec,
    place: RankInfo,
    timed: Sequence[CaseTiming],
    left_out: Sequence[tuple[Case, int]],
    limits: dict[str, Limit | None],
    cluster: dict[str, Any] | None,
    tensors: str,
) -> Record:
    limit = limits["link"] or limits["memory"]
    rate = limit.bytes_per_second if limit else None
    return {
        "schema": SCHEMA,
        "kind": "comm",
        "time": time.time(),
        "software": software(),
        "hardware": hardware(),
        "workers": place.world_size,
        "nodes": place.nnodes,
        "tensors": tensors,
        "plan": plan.to_dict(),
        "cluster": cluster,
        "limits": {kind: asdict(each) if each else None for kind, each in limits.items()},
        "measurements": [_measurement(each, place.world_size, rate) for each in timed],
        "fits": _fits(plan, timed, place.world_size, rate),
        "left_out": [{**asdict(way), "bytes": size} for way, size in left_out],
    }


def _measurement(timed: CaseTiming, workers: int, limit: float | None) -> Record:
    samples = sorted(timed.samples)
    median = statistics.median(samples)
    bus = BUS_FACTORS[timed.way.operation](workers) * timed.size_bytes / median
    return {
        **asdict(timed.way),
        "bytes": timed.size_bytes,
        "repeats": timed.repeats,
        "operations_per_repeat": timed.row,
        "seconds": {
            "mean": statistics.fmean(samples),
            "median": median,
            "p95": samples[min(len(samples) - 1, round(0.95 * (len(samples) - 1)))],
            "least": samples[0],
        },
        "algorithm_bytes_per_second": timed.size_bytes / median,
        "bus_bytes_per_second": bus,
        "share_of_limit": bus / limit if limit else None,
        "samples_seconds": timed.samples,
    }


def _fits(
    plan: BenchmarkSpec, timed: Sequence[CaseTiming], workers: int, limit: float | None
) -> list[Record]:
    fits = []
    for way in plan.ways():
        points = [Point(each.size_bytes, each.samples) for each in timed if each.way == way]
        line = fit(points)
        if line is None:
            continue
        factor = BUS_FACTORS[way.operation](workers)
        bus, error = factor * line.bytes_per_second, line.bytes_per_second_error
        fits.append(
            {
                **asdict(way),
                "sizes": len(points),
                "latency_seconds": line.latency_seconds,
                "latency_seconds_error": line.latency_error_seconds,
                "bus_bytes_per_second": bus,
                "bus_bytes_per_second_error": None if error is None else factor * error,
                "share_of_limit": bus / limit if limit else None,
            }
        )
    return fits
