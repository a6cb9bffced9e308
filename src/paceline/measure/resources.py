"""Read the samples of resources-<node>.jsonl and summarize them for result.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.records import read_lines

Sample = dict[str, Any]
"""One line of the file; measure/sampler.py defines its keys."""

NETWORK_KEYS = (
    "network_bytes_sent",
    "network_bytes_received",
    "loopback_bytes_sent",
    "loopback_bytes_received",
)
DISK_KEYS = ("disk_bytes_read", "disk_bytes_written")


def read_resources(path: Path) -> list[Sample]:
    """Return the complete samples of a file; empty if it does not exist."""
    return [line for line in read_lines(path) if "started" in line and "seconds" in line]


def summarize(path: Path, node: int, training: tuple[float, float] | None = None) -> dict[str, Any]:
    """Return the entry of a node in result.json; None for metrics that no sample has.

    `training` is when the iterations began and ended, in Unix time.

    A sample represents the interval that it ends: means are weighted by interval length, and the
    pause before a resume has no weight. Counters restart at zero with each segment.
    """
    samples = read_resources(path)
    segments = _segments(samples)
    timed = [
        (later["seconds"] - earlier["seconds"], later)
        for segment in segments
        for earlier, later in pairwise(segment)
    ]
    seconds = sum(interval for interval, _ in timed)
    sampler_seconds = _total(segments, "sampler_cpu_seconds")
    return {
        "node": node,
        "samples": len(samples),
        "sampled_seconds": seconds,
        "cpu_percent_mean": _mean(timed, "cpu_percent"),
        "machine_cpu_percent_mean": _mean(timed, "machine_cpu_percent"),
        "rss_bytes_mean": _rounded(_mean(timed, "rss_bytes")),
        "rss_bytes_peak": _peak(samples, "rss_bytes"),
        "pss_bytes_peak": _peak(samples, "pss_bytes"),
        "threads_peak": _peak(samples, "threads"),
        "processes_peak": _peak(samples, "processes"),
        **{key: _total(segments, key) for key in (*NETWORK_KEYS, *DISK_KEYS)},
        "sampler_cpu_percent": 100 * sampler_seconds / seconds if seconds else None,
        "gpus": _summarize_gpus(timed, samples, training),
    }


def _segments(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Group the samples by the sampler process that took them, in file order."""
    segments: dict[float, list[Sample]] = {}
    for sample in samples:
        segments.setdefault(sample["started"], []).append(sample)
    return list(segments.values())


def _total(segments: Iterable[Sequence[Sample]], key: str) -> Any:
    return sum(segment[-1].get(key, 0) - segment[0].get(key, 0) for segment in segments)


def _mean(timed: Iterable[tuple[float, Sample]], key: str) -> float | None:
    known = [(interval, sample[key]) for interval, sample in timed if sample.get(key) is not None]
    weight = sum(interval for interval, _ in known)
    return sum(interval * value for interval, value in known) / weight if weight else None


def _peak(samples: Iterable[Sample], key: str) -> Any:
    return max(
        (sample[key] for sample in samples if sample.get(key) is not None),
        default=None,
    )


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _gpus_of(sample: Sample) -> list[Sample]:
    return sample.get("gpus") or []


def _of_gpu(timed: Iterable[tuple[float, Sample]], index: int) -> list[tuple[float, Sample]]:
    return [
        (interval, _gpus_of(sample)[index])
        for interval, sample in timed
        if len(_gpus_of(sample)) > index
    ]


def _within(
    timed: Iterable[tuple[float, Sample]], training: tuple[float, float] | None
) -> list[tuple[float, Sample]]:
    """The samples that a time interval contains, with all of the interval that they represent."""
    if training is None:
        return []
    began, ended = training
    return [
        (interval, sample)
        for interval, sample in timed
        if began + interval <= sample.get("time", 0.0) <= ended
    ]


def _summarize_gpus(
    timed: Sequence[tuple[float, Sample]],
    samples: Sequence[Sample],
    training: tuple[float, float] | None,
) -> list[dict[str, Any]]:
    count = max((len(_gpus_of(sample)) for sample in samples), default=0)
    summaries = []
    for index in range(count):
        of_gpu = _of_gpu(timed, index)
        in_training = _of_gpu(_within(timed, training), index)
        summaries.append(
            {
                "gpu": index,
                "utilisation_percent_mean": _mean(of_gpu, "utilisation_percent"),
                "utilisation_percent_training_mean": _mean(in_training, "utilisation_percent"),
                "memory_used_bytes_peak": _peak(
                    (_gpus_of(item)[index] for item in samples if len(_gpus_of(item)) > index),
                    "memory_used_bytes",
                ),
                "power_watts_mean": _mean(of_gpu, "power_watts"),
            }
        )
    return summaries
