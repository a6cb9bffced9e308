"""Folders of runs that never were, but whose files agree with one another as a run's do."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import from_mapping
from paceline.records import PHASES, SCHEMA, TRAFFIC_KINDS, EventWriter, RunFolder

BLOCK = 50
"""Iterations in an event."""


@dataclass
class FakeRun:
    """A run by its phases: an iteration of a worker takes the sum of them."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    phases: Sequence[Mapping[str, float]] = ({"forward": 0.01, "backward": 0.01},)
    """Seconds of one iteration, for each worker."""
    iterations: int = 100
    noise: Sequence[float] = (0.0,)
    """Added to the iterations' forward in turn, in seconds; the first iteration takes double."""
    status: str = "finished"
    cause: str | None = None
    accuracy: float = 0.9
    gradient_bytes: int = 0
    """Sent by each worker in an iteration."""
    seconds_to_target: float | None = None
    rss_bytes: int = 500_000_000
    checkpoints: Mapping[str, float] = field(
        default_factory=lambda: {"count": 0, "bytes": 0, "blocked_seconds": 0.0}
    )
    evaluate_seconds: float = 0.5
    more: dict[str, Any] = field(default_factory=dict)
    """Further keys of the result, or other values of its keys."""

    def seconds(self, rank: int) -> list[float]:
        usual = sum(self.phases[rank].values())
        return [
            (2 * usual if index == 0 else usual) + self.noise[index % len(self.noise)]
            for index in range(self.iterations)
        ]

    def losses(self) -> list[float]:
        return [2.0 / (1 + index / 20) for index in range(self.iterations)]


def write_run(root: Path, run: FakeRun) -> Path:
    """Everything that a run leaves, but for checkpoints and TensorBoard's files."""
    workers = len(run.phases)
    config = from_mapping(
        {"strategy": "single" if workers == 1 else "allreduce", "nproc_per_node": workers,
         **run.settings, "out": str(root), "name": run.name, "iterations": run.iterations}
    )  # fmt: skip
    folder = RunFolder.create(config)
    for rank in range(workers):
        _write_events(folder, run, rank)
    _write_resources(folder, run)
    if run.status != "unfinished":
        folder.write_result(_result(folder, run, config.to_dict()))
    return folder.path


def _write_events(folder: RunFolder, run: FakeRun, rank: int) -> None:
    events = EventWriter(folder.events_file(rank))
    events.write("start", iteration=0, resumed=False)
    seconds, losses = run.seconds(rank), run.losses()
    for first in range(0, run.iterations, BLOCK):
        block = slice(first, first + BLOCK)
        events.write("iterations", first=first, seconds=seconds[block], loss=losses[block],
                     learning_rate=0.01)  # fmt: skip
    events.write("end", status=run.status, cause=run.cause)
    events.close()


def _write_resources(folder: RunFolder, run: FakeRun) -> None:
    with folder.resources_file(0).open("w") as file:
        for index in range(10):
            sample = {
                "node": 0, "started": 1000.0, "time": 1000.0 + index, "seconds": 0.5 * index,
                "cpu_percent": None if index == 0 else 90.0 + index, "rss_bytes": run.rss_bytes,
                "network_bytes_sent": 1000 * index * index, "network_bytes_received": 500 * index,
            }  # fmt: skip
            file.write(json.dumps(sample) + "\n")


def _worker(run: FakeRun, rank: int) -> dict[str, Any]:
    seconds = run.seconds(rank)
    phases = dict.fromkeys(PHASES, 0.0)
    for phase, spent in run.phases[rank].items():
        # The first iteration takes double, in every phase.
        phases[phase] += spent * (run.iterations + 1)
    phases["forward"] += sum(run.noise[index % len(run.noise)] for index in range(run.iterations))
    phases["evaluate"], phases["other"] = run.evaluate_seconds, 1.0
    traffic = {
        kind: {"bytes_sent": 0, "bytes_received": 0, "messages": 0, "seconds": 0.0}
        for kind in TRAFFIC_KINDS
    }
    if run.gradient_bytes:
        sent = run.gradient_bytes * run.iterations
        traffic["gradients"] = {
            "bytes_sent": sent,
            "bytes_received": sent,
            "messages": run.iterations,
            "seconds": phases["exchange"],
        }
    rest = sorted(seconds[1:])
    return {
        "rank": rank, "node": 0, "samples": 32 * run.iterations,
        "wall_seconds": sum(phases.values()),
        "iteration_seconds": {
            "first": seconds[0], "mean": statistics.fmean(rest), "median": statistics.median(rest),
            "p95": rest[round(0.95 * (len(rest) - 1))],
        },
        "phases": phases, "hidden_exchange_seconds": 0.0, "traffic": traffic,
    }  # fmt: skip


def _result(folder: RunFolder, run: FakeRun, config: dict[str, Any]) -> dict[str, Any]:
    workers = [_worker(run, rank) for rank in range(len(run.phases))]
    trained = sum(run.seconds(0))
    finished = run.status == "finished"
    history = [
        {"iteration": done, "epoch": done / 50, "seconds": trained * done / run.iterations,
         "test_loss": 1.0 - 0.5 * done / run.iterations,
         "test_accuracy": run.accuracy * done / run.iterations}
        for done in (run.iterations // 2, run.iterations)
    ] if finished else []  # fmt: skip
    return {
        "schema": SCHEMA, "id": folder.id, "status": run.status, "cause": run.cause,
        "config": config, "software": {"paceline": "0.1.0", "torch": "2.13.0"},
        "hardware": {"cpu": "a CPU", "cores": 2, "cores_in_machine": 2, "gpus": []},
        "wall_seconds": max(worker["wall_seconds"] for worker in workers),
        "iterations": run.iterations, "samples": sum(worker["samples"] for worker in workers),
        "weights_sha256": "0" * 64,
        "final": {"train_loss": 0.4, "test_loss": 0.5 if finished else None,
                  "test_accuracy": run.accuracy if finished else None},
        "seconds_to_target": run.seconds_to_target, "history": history, "workers": workers,
        "nodes": [{"node": 0, "cpu_percent_mean": 95.0, "rss_bytes_mean": run.rss_bytes,
                   "rss_bytes_peak": run.rss_bytes + 1, "pss_bytes_peak": run.rss_bytes,
                   "network_bytes_sent": 81_000, "network_bytes_received": 4_500, "gpus": []}],
        "checkpoints": dict(run.checkpoints),
        "measurement_overhead": {"fraction": 0.001}, "warnings": [], **run.more,
    }  # fmt: skip


def write_repeats(root: Path, run: FakeRun, factors: Sequence[float]) -> None:
    """Repeats of a run that take so many times as long, each with a seed of its own."""
    for number, factor in enumerate(factors):
        phases = [{name: spent * factor for name, spent in one.items()} for one in run.phases]
        write_run(
            root,
            FakeRun(
                **{
                    **vars(run),
                    "name": f"{run.name}-{number}",
                    "settings": {**run.settings, "seed": number},
                    "phases": phases,
                }
            ),
        )
