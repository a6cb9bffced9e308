"""CPU, memory, network and GPU use of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from paceline.analysis.curves import Curve, downsample
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup, known
from paceline.analysis.validation import is_number
from paceline.measure.resources import read_resources

RESOURCE_KEYS = {
    "CPU": ("cpu_percent_mean",),
    "memory": ("rss_bytes_mean",),
    "network": ("network_bytes_sent", "network_bytes_received"),
}
"""Resource -> the keys of a node's record that add up to it."""


@dataclass(frozen=True, slots=True)
class NodeCurves:
    """Resource use of a node against seconds since sampling began."""

    node: int
    cpu_percent: Curve
    rss_bytes: Curve
    sent_bytes_per_second: Curve
    received_bytes_per_second: Curve


def node_curves(run: Run, node: int) -> NodeCurves | None:
    """None with fewer than two samples."""
    samples = [
        sample
        for sample in read_resources(run.folder.resources_file(node))
        if is_number(sample["seconds"]) and is_number(sample["started"])
    ]
    if len(samples) < 2:
        return None
    return NodeCurves(
        node,
        _level(samples, "cpu_percent"),
        _level(samples, "rss_bytes"),
        _rate(samples, "network_bytes_sent"),
        _rate(samples, "network_bytes_received"),
    )


def _seconds(sample: dict[str, Any], first: dict[str, Any]) -> float:
    return float(sample["started"] - first["started"] + sample["seconds"])


def _level(samples: Sequence[dict[str, Any]], key: str) -> Curve:
    pairs = [
        (_seconds(sample, samples[0]), sample[key])
        for sample in samples
        if is_number(sample.get(key))
    ]
    return _curve(pairs)


def _rate(samples: Sequence[dict[str, Any]], key: str) -> Curve:
    """Bytes per second between consecutive samples of one sampler."""
    pairs = [
        (
            _seconds(later, samples[0]),
            (later[key] - earlier[key]) / (later["seconds"] - earlier["seconds"]),
        )
        for earlier, later in pairwise(samples)
        if is_number(later.get(key))
        and is_number(earlier.get(key))
        and earlier["started"] == later["started"]
        and later["seconds"] > earlier["seconds"]
    ]
    return _curve(pairs)


def _curve(pairs: Sequence[tuple[float, float]]) -> Curve:
    values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return downsample(values[:, 0], values[:, 1])


def nodes_by_number(group: RunGroup) -> dict[int, list[dict[str, Any]]]:
    """Records of each sampled node, one per finished run."""
    nodes: dict[int, list[dict[str, Any]]] = {}
    for run in group.finished:
        for node in run.nodes:
            if is_number(node.get("rss_bytes_peak")):
                nodes.setdefault(int(node.get("node", 0)), []).append(node)
    return dict(sorted(nodes.items()))


def gpus_by_name(group: RunGroup) -> dict[str, list[dict[str, Any]]]:
    """Records of each GPU, one per finished run."""
    gpus: dict[str, list[dict[str, Any]]] = {}
    for run in group.finished:
        for node in run.nodes:
            for gpu in node.get("gpus") or ():
                if isinstance(gpu, dict):
                    name = f"node {node.get('node', 0)}, GPU {gpu.get('gpu', '?')}"
                    gpus.setdefault(name, []).append(gpu)
    return gpus


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Kernel time of traced iterations, one value per worker and run."""

    iterations: list[float]
    seconds_per_iteration: list[float]
    shares: list[float]
    """Of the duration of these iterations."""


def kernel_time(group: RunGroup) -> KernelTime | None:
    """None if no finished run traced iterations on a GPU."""
    found = [
        recorded
        for run in group.finished
        for worker in run.workers
        if isinstance(recorded := worker.get("kernel_time"), dict)
        and all(is_number(recorded.get(key)) for key in ("iterations", "seconds", "window_seconds"))
        and recorded["iterations"] > 0
        and recorded["window_seconds"] > 0
    ]
    if not found:
        return None
    return KernelTime(
        [one["iterations"] for one in found],
        [one["seconds"] / one["iterations"] for one in found],
        [one["seconds"] / one["window_seconds"] for one in found],
    )


COPY_KEYS = ("count", "bytes", "pageable_bytes", "seconds", "gpu_seconds")


def host_copies(group: RunGroup) -> list[dict[str, Any]]:
    """Copies to GPUs of each worker of the finished runs, per iteration, with the pageable share.

    Empty if the runs recorded none.
    """
    found = []
    for run in group.finished:
        for worker in run.workers:
            copies = worker.get("host_to_device")
            if not isinstance(copies, dict):
                continue
            # Copies are counted in other iterations than times; earlier records do not say so.
            iterations = copies.get("iterations", run.iterations)
            if not is_number(iterations) or iterations <= 0:
                continue
            if all(is_number(copies.get(key)) for key in COPY_KEYS) and copies["bytes"] > 0:
                per_iteration = {key: copies[key] / iterations for key in COPY_KEYS}
                pageable_share = copies["pageable_bytes"] / copies["bytes"]
                found.append({**per_iteration, "pageable_share": pageable_share})
    return found


def record_values(records: Sequence[dict[str, Any]], key: str) -> list[float]:
    return known(record[key] if is_number(record.get(key)) else None for record in records)


def first_node_ratios(group: RunGroup) -> dict[str, list[float]]:
    """Use of node 0 over the mean of the other nodes, of each finished run with several nodes."""
    ratios = [one for run in group.finished if (one := _first_node_ratio(run)) is not None]
    if not ratios:
        return {}
    return {name: known(one.get(name) for one in ratios) for name in RESOURCE_KEYS}


def _first_node_ratio(run: Run) -> dict[str, float] | None:
    first = [node for node in run.nodes if not node.get("node", 0)]
    others = [node for node in run.nodes if node.get("node", 0)]
    if not first or not others:
        return None
    found = {}
    for name, keys in RESOURCE_KEYS.items():
        own = sum(sum(record_values(first, key)) for key in keys)
        theirs = sum(sum(record_values(others, key)) for key in keys) / len(others)
        if own and theirs:
            found[name] = own / theirs
    return found or None
