"""Validation of result.json.

A file can be valid JSON with the right keys and still hold values that no run writes. The other
modules rely on these checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import RecordsError
from paceline.records import (
    BETWEEN_ITERATIONS,
    PHASES,
    Result,
    is_cuda_graph,
    is_memory,
    is_noise_scale,
    is_numerics,
)
from paceline.records import is_number as is_number

BUCKET_MEASUREMENTS = (
    "backward_seconds",
    "latency_seconds",
    "seconds_per_byte",
    "overlapped_seconds_per_byte",
)
"""Numbers in `buckets.measurements` of a worker that the report shows."""
STATUSES = ("finished", "diverged", "failed", "stopped")


def check_result(result: Result, name: str) -> None:
    """Raise RecordsError for the first invalid value."""
    wrong = _first_wrong(result)
    if wrong:
        raise RecordsError(f"{name} is damaged: {wrong}")


def _first_wrong(result: Result) -> str | None:
    for key in ("config", "software", "hardware", "final", "checkpoints", "measurement_overhead"):
        if not isinstance(result[key], dict):
            return f"{key} is not an object"
    if result["status"] not in STATUSES:
        return f"status is {result['status']!r}"
    for key in ("wall_seconds", "iterations", "samples"):
        is_unknown = key == "samples" and result[key] is None
        if not is_unknown and (not is_number(result[key]) or result[key] < 0):
            return f"{key} is not a number"
    for key in ("history", "workers", "nodes"):
        rows = result[key]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            return f"{key} is not a list of objects"
    problems = [_wrong_worker(worker) for worker in result["workers"]]
    problems += [_wrong_entry(entry) for entry in result["history"]]
    problems += [_not_numbers(result[key], key) for key in ("final", "checkpoints")]
    problems += [_wrong_metrics(one) for one in (result, *result["history"])]
    problems += [_not_numbers({"seconds_to_target": result["seconds_to_target"]}, "result")]
    problems += [_wrong_node(node) for node in result["nodes"]]
    problems += [_wrong_surroundings(result)]
    return next(filter(None, problems), None)


def _wrong_node(node: Mapping[str, Any]) -> str | None:
    if not is_number(node.get("node")):
        return "a node has no number"
    return None if isinstance(node.get("gpus", []), list) else "gpus of a node is not a list"


def _wrong_surroundings(result: Result) -> str | None:
    """Hardware, cluster, restarts and warnings."""
    hardware, cluster = result["hardware"], result.get("cluster", {})
    if not isinstance(cluster, dict):
        return "cluster is not an object"
    measured = cluster.get("got", [])
    for name, values in (
        ("warnings", result.get("warnings", [])),
        ("restarts", result.get("restarts", [])),
        ("gpus", hardware.get("gpus", [])),
        ("got", measured),
    ):
        if not isinstance(values, list):
            return f"{name} is not a list"
    for restart in result.get("restarts", []):
        if not isinstance(restart, dict) or not {"cause", "iteration"} <= restart.keys():
            return "a restart has no cause or no iteration"
    for item in measured:
        if not isinstance(item, dict) or not is_number(item.get("got")):
            return "a measurement of the cluster is not a number"
    asked = [{"asked": item.get("asked")} for item in measured]
    quota = {"cpu_quota": hardware.get("cpu_quota")}
    problems = [_not_numbers(one, "the cluster or the machine") for one in (*asked, quota)]
    return next(filter(None, problems), None)


def _wrong_entry(entry: Mapping[str, Any]) -> str | None:
    for key in ("iteration", "epoch", "seconds"):
        if not is_number(entry.get(key)):
            return f"an entry of history has no {key}"
    return _not_numbers(
        {key: entry.get(key) for key in ("test_loss", "test_accuracy")}, "an entry of history"
    )


def _wrong_metrics(record: Mapping[str, Any]) -> str | None:
    metrics = record.get("metrics", {})
    return _not_numbers(metrics, "metrics") if isinstance(metrics, dict) else "metrics is damaged"


def _wrong_worker(worker: Mapping[str, Any]) -> str | None:
    for key in ("rank", "node", "wall_seconds"):
        if not is_number(worker.get(key)):
            return f"a worker has no {key}"
    # The number of samples of a profiled script may be unknown.
    if "samples" not in worker or not is_number(worker["samples"] or 0):
        return "a worker has no samples"
    later = worker.get("after_first")
    if later is not None and not isinstance(later, dict):
        return "after_first of a worker is not an object"
    for figures in (worker, later or {}):
        hidden = figures.get("hidden_exchange_seconds")
        if hidden is not None and not is_number(hidden):
            return "hidden_exchange_seconds of a worker is not a number"
    if later and _wrong_later(later):
        return "after_first of a worker is damaged"
    phases, timing = worker.get("phases"), worker.get("iteration_seconds")
    if not isinstance(phases, dict) or not all(is_number(phases.get(name)) for name in PHASES):
        return "a worker's phases are not all numbers"
    if not isinstance(timing, dict):
        return "a worker has no iteration_seconds"
    traffic = worker.get("traffic", {})
    if not isinstance(traffic, dict) or not all(isinstance(one, dict) for one in traffic.values()):
        return "a worker's traffic is not an object of objects"
    if not all(is_number(value) for count in traffic.values() for value in count.values()):
        return "a worker's traffic is not all numbers"
    if "buckets" in worker and _are_wrong_buckets(worker["buckets"]):
        return "a worker's buckets are damaged"
    if "memory" in worker and not is_memory(worker["memory"]):
        return "a worker's memory is damaged"
    if "numerics" in worker and not is_numerics(worker["numerics"]):
        return "a worker's numerics are damaged"
    if "cuda_graph" in worker and not is_cuda_graph(worker["cuda_graph"]):
        return "a worker's cuda_graph is damaged"
    if "noise_scale" in worker and not is_noise_scale(worker["noise_scale"]):
        return "a worker's noise_scale is damaged"
    return _not_numbers(timing, "iteration_seconds")


def _are_wrong_buckets(buckets: Any) -> bool:
    if not isinstance(buckets, dict) or not isinstance(buckets.get("reason"), str):
        return True
    measured = buckets.get("measurements")
    if measured is None:
        measured = dict.fromkeys(BUCKET_MEASUREMENTS, 0)
    return not (
        all(is_number(buckets.get(name)) for name in ("count", "bucket_mib"))
        and isinstance(measured, dict)
        and all(is_number(measured.get(name)) for name in BUCKET_MEASUREMENTS)
    )


def _wrong_later(later: Mapping[str, Any]) -> bool:
    phases, count = later.get("phases"), later.get("iterations")
    if type(count) is not int or count < 0 or not isinstance(phases, dict):
        return True
    sent = later.get("bytes_sent")
    if sent is not None and not (isinstance(sent, dict) and all(map(is_number, sent.values()))):
        return True
    names = [name for name in PHASES if name not in BETWEEN_ITERATIONS]
    return not all(is_number(phases.get(name)) for name in names)


def _not_numbers(values: Mapping[str, Any], where: str) -> str | None:
    for key, value in values.items():
        if value is not None and not isinstance(value, str | bool) and not is_number(value):
            return f"{key} of {where} is not a number"
        if isinstance(value, str) and key not in ("mode",):
            return f"{key} of {where} is not a number"
    return None
