"""The reports of all workers and the samples of all nodes, put together as result.json."""

from __future__ import annotations

from paceline.config import RunConfig
from paceline.measure.machine import hardware, software
from paceline.measure.resources import summarise
from paceline.records import SCHEMA, Result, RunFolder
from paceline.worker.run import WorkerReport


def assemble(config: RunConfig, folder: RunFolder, reports: list[WorkerReport]) -> Result:
    first = reports[0]
    last = first.history[-1] if first.history else {}
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
        "nodes": [summarise(folder.resources_file(node), node) for node in range(config.nnodes)],
        "checkpoints": first.checkpoints,
        "measurement_overhead": {"fraction": max(report.measuring_fraction for report in reports)},
        "warnings": first.warnings,
    }
