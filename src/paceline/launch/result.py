"""The reports of all workers and the samples of all nodes, put together as result.json."""

from __future__ import annotations

from typing import Any

from paceline.config import RunConfig
from paceline.measure.machine import cores_usable, hardware, software
from paceline.measure.resources import summarise
from paceline.records import SCHEMA, Result, RunFolder
from paceline.worker.run import WorkerReport


def assemble(config: RunConfig, folder: RunFolder, reports: list[WorkerReport]) -> Result:
    first = reports[0]
    last = first.history[-1] if first.history else {}
    nodes = [summarise(folder.resources_file(node), node) for node in range(config.nnodes)]
    return {
        "schema": SCHEMA,
        "id": folder.id,
        "status": first.status,
        "cause": first.cause,
        "config": config.to_dict(),
        "software": software(),
        "hardware": hardware(),
        "wall_seconds": max(report.worker["wall_seconds"] for report in reports),
        "iterations": first.iterations,
        "samples": sum(report.worker["samples"] for report in reports),
        "weights_sha256": first.weights_sha256,
        "final": {
            "train_loss": first.train_loss,
            "test_loss": last.get("test_loss"),
            "test_accuracy": last.get("test_accuracy"),
        },
        "seconds_to_target": first.seconds_to_target,
        "history": first.history,
        "workers": [report.worker for report in reports],
        "nodes": nodes,
        "checkpoints": first.checkpoints,
        "measurement_overhead": measurement_overhead(reports, nodes),
        "warnings": first.warnings,
    }


def measurement_overhead(
    reports: list[WorkerReport], nodes: list[dict[str, Any]]
) -> dict[str, float]:
    """What measuring took of a step: inside the loop, and by the sampler on shared cores."""
    in_loop = max(report.measuring_fraction for report in reports)
    busiest = max(node["sampler_cpu_percent"] or 0.0 for node in nodes)
    sampler = busiest / 100 / cores_usable()
    return {"fraction": in_loop + sampler, "in_loop": in_loop, "sampler": sampler}
