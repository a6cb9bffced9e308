"""What plans use of `paceline comm --json` files: times of collectives and of codecs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

from paceline.errors import RecordsError
from paceline.plan.calibration import CodecTiming, CollectiveTiming, SizePoint, parse
from paceline.plan.links import Link

Values = Mapping[str, Any]
Entries = tuple[Values, ...]
Timing = TypeVar("Timing", CollectiveTiming, CodecTiming)


def comm_timings(record: Mapping[str, Any], name: str) -> list[CollectiveTiming]:
    """The measurements of a `paceline comm --json` file."""
    if record.get("kind") != "comm":
        raise RecordsError(
            f"{name} is not a record of `paceline comm`: give runs and records of `paceline comm`"
        )
    cases: dict[tuple[str, str, str], list[SizePoint]] = {}
    with _reading(name):
        hosts, workers = parse(int, record["nodes"]), parse(int, record["workers"])
        link = _comm_link(record) if hosts > 1 else None
        for one in parse(Entries, record["measurements"]):
            operation, algorithm = parse(str, one["operation"]), parse(str, one["algorithm"])
            key = operation, parse(str, one["communicator"]), algorithm
            cases.setdefault(key, []).append(_point(one))
    own_gpus = record.get("tensors") == "own GPUs"
    timings = [
        CollectiveTiming(
            backend_of(communicator, hosts, own_gpus), operation, algorithm, workers, hosts, link,
            tuple(points),
        )
        for (operation, communicator, algorithm), points in cases.items()
    ]  # fmt: skip
    return _checked(merged(timings), name)


def codec_timings(record: Mapping[str, Any], name: str) -> list[CodecTiming]:
    """The codecs of a `paceline comm --codecs --json` file."""
    cases: dict[tuple[str, int, bool], list[SizePoint]] = {}
    with _reading(name):
        for one in parse(Entries, record.get("codecs", ())):
            # Earlier versions timed vectors.
            key = parse(str, one["codec"]), parse(int, one["workers"]), "shape" in one
            cases.setdefault(key, []).append(_point(one))
    timings = [
        CodecTiming(codec, workers, tuple(points), has_matrices)
        for (codec, workers, has_matrices), points in cases.items()
    ]
    return _checked(merged(timings), name)


def comm_cpu(record: Mapping[str, Any], name: str) -> Any:
    """The CPU model that a `paceline comm --json` file was measured on; None if it is unknown."""
    with _reading(name):
        return parse(Values, record.get("hardware") or {}).get("cpu")


def merged(timings: Iterable[Timing]) -> list[Timing]:
    """One timing of all samples of a collective or codec, and one point of equal sizes."""
    known: dict[Timing, dict[int, list[float]]] = {}
    for timing in timings:
        samples = known.setdefault(replace(timing, points=()), {})
        for point in timing.points:
            samples.setdefault(point.size_bytes, []).extend(point.seconds)
    return [
        replace(
            timing,
            points=tuple(SizePoint(size, tuple(samples[size])) for size in sorted(samples)),
        )
        for timing, samples in known.items()
    ]


def _point(one: Mapping[str, Any]) -> SizePoint:
    return SizePoint(parse(int, one["bytes"]), parse(tuple[float, ...], one["samples_seconds"]))


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """RecordsError for values that are missing or of another type."""
    try:
        yield
    except KeyError as error:
        raise _damaged(name, f"{error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise _damaged(name, str(error)) from None


def _checked(timings: list[Timing], name: str) -> list[Timing]:
    for timing in timings:
        for problem in timing.problems():
            raise _damaged(name, problem)
    return timings


def _damaged(name: str, problem: str) -> RecordsError:
    return RecordsError(f"{name} is damaged: {problem}: measure again with `paceline comm --json`")


def backend_of(
    communicator: str, hosts: int, own_gpus: bool
) -> Literal["gloo", "nccl", "shm", "hierarchical"]:
    if communicator == "torch":
        return "nccl" if own_gpus else "gloo"
    return "shm" if hosts == 1 else "hierarchical"


def _comm_link(record: Mapping[str, Any]) -> Link | None:
    """The nominal link, from the emulated cluster or --link."""
    cluster = parse(Values, record.get("cluster") or {})
    asked = parse(Values, cluster.get("asked") or {})
    of_nodes = parse(Values, asked.get("bandwidth_of") or {})
    rates = [asked.get("bandwidth_bits_per_second"), *of_nodes.values()]
    known = [parse(float, rate) for rate in rates if rate is not None]
    if known:
        return Link(min(known), parse(float, asked.get("latency_seconds") or 0.0))
    rate = parse(Values, record.get("plan", {})).get("link_bits_per_second")
    return Link(parse(float, rate)) if rate else None
