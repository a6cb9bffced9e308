"""What plans use of `paceline comm --json` files: times of collectives and of codecs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from paceline.errors import RecordsError
from paceline.plan.calibration import CodecTiming, CollectiveTiming, SizePoint
from paceline.plan.links import Link


def comm_timings(record: Mapping[str, Any], name: str) -> list[CollectiveTiming]:
    """The measurements of a `paceline comm --json` file."""
    if record.get("kind") != "comm":
        raise RecordsError(
            f"{name} is neither a record of `paceline comm` nor a calibration: give runs, comm"
            " records or a calibration"
        )
    try:
        hosts, workers = int(record["nodes"]), int(record["workers"])
        link = _comm_link(record) if hosts > 1 else None
        cases: dict[tuple[str, str, str], list[SizePoint]] = {}
        for one in record["measurements"]:
            key = one["operation"], one["communicator"], one["algorithm"]
            samples = tuple(float(each) for each in one["samples_seconds"])
            cases.setdefault(key, []).append(SizePoint(int(one["bytes"]), samples))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordsError(f"{name} is damaged: {error!r}") from None
    own_gpus = record.get("tensors") == "own GPUs"
    return [
        CollectiveTiming(
            backend_of(communicator, hosts, own_gpus), operation, algorithm, workers, hosts, link,
            tuple(points),
        )
        for (operation, communicator, algorithm), points in cases.items()
    ]  # fmt: skip


def codec_timings(record: Mapping[str, Any], name: str) -> list[CodecTiming]:
    """The codecs of a `paceline comm --codecs --json` file."""
    cases: dict[tuple[str, int], list[SizePoint]] = {}
    try:
        for one in record.get("codecs", ()):
            samples = tuple(float(each) for each in one["samples_seconds"])
            points = cases.setdefault((str(one["codec"]), int(one["workers"])), [])
            points.append(SizePoint(int(one["bytes"]), samples))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordsError(f"{name} is damaged: {error!r}") from None
    return [
        CodecTiming(codec, workers, tuple(points)) for (codec, workers), points in cases.items()
    ]


def backend_of(
    communicator: str, hosts: int, own_gpus: bool
) -> Literal["gloo", "nccl", "shm", "hierarchical"]:
    if communicator == "torch":
        return "nccl" if own_gpus else "gloo"
    return "shm" if hosts == 1 else "hierarchical"


def _comm_link(record: Mapping[str, Any]) -> Link | None:
    """The nominal link, from the emulated cluster or --link."""
    asked = (record.get("cluster") or {}).get("asked") or {}
    rates = [asked.get("bandwidth_bits_per_second"), *asked.get("bandwidth_of", {}).values()]
    known = [float(rate) for rate in rates if rate is not None]
    if known:
        return Link(min(known), float(asked.get("latency_seconds") or 0.0))
    rate = record.get("plan", {}).get("link_bits_per_second")
    return Link(float(rate)) if rate else None
