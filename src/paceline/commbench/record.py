"""The record of a benchmark, as `--json` writes it and report/ reads it.

    schema            1
    kind              "comm"
    time              Unix time of the end
    software, hardware   of the first machine, as in result.json
    workers, nodes    counts
    tensors           location: main memory, own GPUs (one per worker, NCCL between them) or
                      shared GPUs (exchanged through main memory)
    plan              the request (BenchmarkSpec of commbench/spec.py)
    cluster           the emulated cluster, as in result.json; null outside of one
    limits            link and memory: bytes_per_second, source; null where unknown
    measurements      one for each operation, communicator, algorithm and size:
                      bytes, repeats, operations_per_repeat, samples_seconds,
                      seconds {mean, median, p95, least},
                      algorithm_bytes_per_second, bus_bytes_per_second, share_of_limit
    fits              one for each operation, communicator and algorithm with two or more sizes
                      whose times clearly rise with size:
                      latency_seconds, bus_bytes_per_second, each also with _error (null with two
                      sizes); share_of_limit
    codecs            one for each codec, number of workers and size: bytes and shape of the
                      gradient, workers whose payloads are decoded, repeats, samples_seconds,
                      seconds {mean, median, p95, least} of encoding and decoding
    left_out          sizes skipped because smaller ones took too long, with their case

docs/metrics.md defines the metrics.
"""

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
    from paceline.commbench.codecs import CodecTiming
    from paceline.commbench.runner import CaseTiming


RECORD_FILE = "comm.json"

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limit:
    """What bus bandwidth is compared to: the link between machines, or the memory of one."""

    kind: str
    """link or memory."""
    bytes_per_second: float
    source: str
    """Origin of the number, as tables show it."""


def link_limit(spec: BenchmarkSpec, cluster: dict[str, Any] | None) -> Limit | None:
    """From --link, or else the calibration of the emulated cluster (emulation/state.py)."""
    if spec.link_bits_per_second is not None:
        return Limit("link", spec.link_bits_per_second / 8, "from --link")
    if cluster is None:
        return None
    measured = [item["got"] for item in cluster["got"] if item["what"].startswith("bandwidth")]
    if measured:
        return Limit("link", min(measured) / 8, "calibrated, slowest link")
    if requested := _requested_rates(cluster["asked"] or {}):
        return Limit("link", min(requested) / 8, "requested from the emulated cluster")
    return None


def _requested_rates(spec: dict[str, Any]) -> list[float]:
    rates = [spec.get("bandwidth_bits_per_second"), *spec.get("bandwidth_of", {}).values()]
    return [rate for rate in rates if rate is not None]


def make_record(
    spec: BenchmarkSpec,
    rank_info: RankInfo,
    timings: Sequence[CaseTiming],
    codecs: Sequence[CodecTiming],
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
        "workers": rank_info.world_size,
        "nodes": rank_info.nnodes,
        "tensors": tensors,
        "plan": spec.to_dict(),
        "cluster": cluster,
        "limits": {kind: asdict(each) if each else None for kind, each in limits.items()},
        "measurements": [_measurement(timing, rank_info.world_size, rate) for timing in timings],
        "fits": _fits(spec, timings, rank_info.world_size, rate),
        "codecs": [_codec_measurement(timing) for timing in codecs],
        "left_out": [{**asdict(case), "bytes": size} for case, size in left_out],
    }


def _measurement(timing: CaseTiming, workers: int, limit: float | None) -> Record:
    median = statistics.median(timing.samples)
    bus = BUS_FACTORS[timing.case.operation](workers) * timing.size_bytes / median
    return {
        **asdict(timing.case),
        "bytes": timing.size_bytes,
        "repeats": timing.repeats,
        "operations_per_repeat": timing.batch,
        "seconds": _summary(timing.samples),
        "algorithm_bytes_per_second": timing.size_bytes / median,
        "bus_bytes_per_second": bus,
        "share_of_limit": bus / limit if limit else None,
        "samples_seconds": timing.samples,
    }


def _codec_measurement(timing: CodecTiming) -> Record:
    return {
        "codec": timing.codec,
        "workers": timing.workers,
        "bytes": timing.size_bytes,
        "shape": list(timing.shape),
        "repeats": len(timing.samples),
        "seconds": _summary(timing.samples),
        "samples_seconds": timing.samples,
    }


def _summary(seconds: Sequence[float]) -> Record:
    samples = sorted(seconds)
    return {
        "mean": statistics.fmean(samples),
        "median": statistics.median(samples),
        "p95": samples[min(len(samples) - 1, round(0.95 * (len(samples) - 1)))],
        "least": samples[0],
    }


def _fits(
    spec: BenchmarkSpec, timings: Sequence[CaseTiming], workers: int, limit: float | None
) -> list[Record]:
    fits = []
    for case in spec.cases():
        points = [Point(each.size_bytes, each.samples) for each in timings if each.case == case]
        line = fit(points)
        if line is None:
            continue
        factor = BUS_FACTORS[case.operation](workers)
        bus, error = factor * line.bytes_per_second, line.bytes_per_second_error
        fits.append(
            {
                **asdict(case),
                "sizes": len(points),
                "latency_seconds": line.latency_seconds,
                "latency_seconds_error": line.latency_error_seconds,
                "bus_bytes_per_second": bus,
                "bus_bytes_per_second_error": None if error is None else factor * error,
                "share_of_limit": bus / limit if limit else None,
            }
        )
    return fits
