"""Fake run folders, with files that are consistent with one another."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import Kind, RunSettings, from_mapping
from paceline.measure.noise_scale import SAMPLE_KEYS, NoiseSample
from paceline.records import (
    BETWEEN_ITERATIONS,
    PHASES,
    SCHEMA,
    TRAFFIC_KINDS,
    EventWriter,
    RunFolder,
)

BLOCK = 50
"""Iterations per event."""


@dataclass
class FakeRun:
    """A run defined by its phases: an iteration takes the sum of their times."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    phases: Sequence[Mapping[str, float]] = ({"forward": 0.01, "backward": 0.01},)
    """Seconds per iteration, by worker."""
    iterations: int = 100
    noise: Sequence[float] = (0.0,)
    """Added to the iterations' forward in turn, in seconds; the first iteration takes double."""
    status: str = "finished"
    cause: str | None = None
    accuracy: float | None = 0.9
    loss: float = 0.5
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Besides accuracy, at the end; half of it after half of the run."""
    gradient_bytes: int = 0
    """Sent by each worker in an iteration."""
    seconds_to_target: float | None = None
    rss_bytes: int = 500_000_000
    checkpoints: Mapping[str, float] = field(
        default_factory=lambda: {"count": 0, "bytes": 0, "blocked_seconds": 0.0}
    )
    evaluate_seconds: float = 0.5
    nodes: int = 1
    """Workers are spread over them evenly; node n uses n + 1 times the CPU of node 0."""
    shares: Sequence[int] = ()
    """Samples of an iteration, for each worker; 32 where none are given."""
    hidden: float | None = 0.0
    """Overlapped communication of an iteration; the first one has double. None: not measured."""
    is_old: bool = False
    """Whether the version that wrote it did not yet keep the first iteration's phases apart."""
    kind: Kind = "train"
    """join and profile: `settings` are all that is known, besides the number of workers; a profiled
    script has no losses, evaluations or samples."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further keys of the result, or other values of its keys."""

    def seconds(self, rank: int) -> list[float]:
        usual = sum(self.phases[rank].values())
        return [
            (2 * usual if index == 0 else usual) + self.noise[index % len(self.noise)]
            for index in range(self.iterations)
        ]

    def history(self) -> list[dict[str, Any]]:
        """After each half of the run; an epoch has 50 iterations."""
        if self.status != "finished" or self.kind != "train":
            return []
        trained = sum(self.seconds(0))
        return [
            {"iteration": done, "epoch": done / 50, "seconds": trained * done / self.iterations,
             "test_loss": 2 * self.loss - self.loss * done / self.iterations,
             "learning_rate": 0.01, **self.figures(done / self.iterations)}
            for done in (self.iterations // 2, self.iterations)
        ]  # fmt: skip

    def figures(self, share: float) -> dict[str, Any]:
        """Accuracy, and metrics if it has any, after this share of the run."""
        accuracy = None if self.accuracy is None else self.accuracy * share
        metrics = {name: value * share for name, value in self.metrics.items()}
        return {"test_accuracy": accuracy, **({"metrics": metrics} if metrics else {})}

    def losses(self) -> list[float]:
        return [2.0 / (1 + index / 20) for index in range(self.iterations)]


def write_run(root: Path, run: FakeRun) -> Path:
    """Everything that a run leaves, but for checkpoints and TensorBoard's files."""
    workers = len(run.phases)
    if run.kind == "train":
        settings = RunSettings.of(from_mapping(
            {"strategy": "single" if workers == 1 else "allreduce", "nproc_per_node": workers,
             **run.settings, "out": str(root), "name": run.name, "iterations": run.iterations}
        ))  # fmt: skip
    else:
        known = {**run.settings, "world_size": workers, "nnodes": run.nodes}
        settings = RunSettings(run.kind, known)
    folder = RunFolder.create_at(root / run.name, settings)
    for rank in range(workers):
        _write_events(folder, run, rank)
    for node in range(run.nodes):
        _write_resources(folder, run, node)
    if run.status != "unfinished":
        folder.write_result(_result(folder, run, settings))
    return folder.path


def _write_events(folder: RunFolder, run: FakeRun, rank: int) -> None:
    events = EventWriter(folder.events_file(rank))
    events.write("start", iteration=0, resumed=False)
    seconds, losses = run.seconds(rank), run.losses()
    for first in range(0, run.iterations, BLOCK):
        block = slice(first, first + BLOCK)
        trained = {} if run.kind == "profile" else {"loss": losses[block], "learning_rate": 0.01}
        events.write("iterations", first=first, seconds=seconds[block], **trained)
    for entry in run.history():
        events.write("evaluation", **entry, rank=rank, wall_seconds=2.0 + entry["seconds"])
    events.write("end", status=run.status, cause=run.cause)
    events.close()


def _write_resources(folder: RunFolder, run: FakeRun, node: int) -> None:
    with folder.resources_file(node).open("w") as file:
        for index in range(10):
            sample = {
                "node": node, "started": 1000.0, "time": 1000.0 + index, "seconds": 0.5 * index,
                "cpu_percent": None if index == 0 else 90.0 + index + 10 * node,
                "rss_bytes": run.rss_bytes,
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
    later = {phase: spent * (run.iterations - 1) for phase, spent in run.phases[rank].items()}
    later["forward"] = later.get("forward", 0.0) + sum(
        run.noise[index % len(run.noise)] for index in range(1, run.iterations)
    )
    in_iteration = [phase for phase in PHASES if phase not in BETWEEN_ITERATIONS]
    after_first = {
        "iterations": run.iterations - 1,
        "phases": {phase: later.get(phase, 0.0) for phase in in_iteration},
        "hidden_exchange_seconds": _times(run.hidden, run.iterations - 1),
        "bytes_sent": {
            **dict.fromkeys(TRAFFIC_KINDS, 0),
            "gradients": run.gradient_bytes * (run.iterations - 1),
        },
    }
    return {
        "rank": rank, "node": rank * run.nodes // len(run.phases),
        "samples": _samples(run, rank),
        "wall_seconds": sum(phases.values()),
        "iteration_seconds": {
            "first": seconds[0], "mean": statistics.fmean(rest), "median": statistics.median(rest),
            "p95": rest[round(0.95 * (len(rest) - 1))],
        },
        "phases": phases, "hidden_exchange_seconds": _times(run.hidden, run.iterations + 1),
        "traffic": traffic, **({} if run.is_old else {"after_first": after_first}),
    }  # fmt: skip


def _samples(run: FakeRun, rank: int) -> int | None:
    if run.kind == "profile":
        return None
    return (run.shares[rank] if run.shares else 32) * run.iterations


def _times(seconds: float | None, count: int) -> float | None:
    return None if seconds is None else seconds * count


def _result(folder: RunFolder, run: FakeRun, settings: RunSettings) -> dict[str, Any]:
    workers = [_worker(run, rank) for rank in range(len(run.phases))]
    samples = [worker["samples"] for worker in workers]
    finished = run.status == "finished" and run.kind == "train"
    return {
        "schema": SCHEMA, "id": folder.id, "status": run.status, "cause": run.cause,
        **settings.to_record(), "software": {"paceline": "0.1.0", "torch": "2.13.0"},
        "hardware": {"cpu": "a CPU", "cores": 2, "cores_in_machine": 2, "gpus": []},
        "wall_seconds": max(worker["wall_seconds"] for worker in workers),
        "iterations": run.iterations, "samples": None if None in samples else sum(samples),
        "weights_sha256": "0" * 64,
        "final": {} if run.kind == "profile" else {
            "train_loss": 0.4, "test_loss": run.loss if finished else None,
            "test_accuracy": run.accuracy if finished else None,
        },
        **({"metrics": dict(run.metrics)} if run.metrics else {}),
        "seconds_to_target": run.seconds_to_target, "history": run.history(), "workers": workers,
        "nodes": [{"node": node, "cpu_percent_mean": 95.0 * (node + 1),
                   "rss_bytes_mean": run.rss_bytes,
                   "rss_bytes_peak": run.rss_bytes + 1, "pss_bytes_peak": run.rss_bytes,
                   "network_bytes_sent": 81_000, "network_bytes_received": 4_500, "gpus": []}
                  for node in range(run.nodes)],
        "checkpoints": dict(run.checkpoints),
        "measurement_overhead": {"fraction": 0.001}, "warnings": [], **run.more,
    }  # fmt: skip


def write_asynchronous(root: Path, name: str, *, is_old: bool = False) -> Path:
    """An asynchronous run of 100 iterations with 64 samples each.

    Both workers process 3,200 samples a second, one in 100 iterations and the other in 50: together
    they take 10 ms for the samples of an iteration, while the mean over the workers is 15 ms.
    """
    path = write_run(root, FakeRun(name, {}, [{"forward": 0.01}] * 2, is_old=is_old))
    result = json.loads((path / "result.json").read_text())
    for worker, count in zip(result["workers"], (100, 50), strict=True):
        worker["staleness"] = {}
        worker["iteration_seconds"] = dict.fromkeys(("first", "mean", "median", "p95"), 1 / count)
        if not is_old:
            worker["after_first"]["iterations"] = count - 1
        events = {"event": "iterations", "first": 0, "seconds": [1 / count] * count,
                  "loss": [1.0] * count}  # fmt: skip
        (path / f"events-{worker['rank']}.jsonl").write_text(json.dumps(events) + "\n")
    (path / "result.json").write_text(json.dumps(result))
    return path


def write_repeats(root: Path, run: FakeRun, factors: Sequence[float]) -> None:
    """Repeats of a run, each with its own seed and its duration multiplied by a factor."""
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


def write_trace(path: Path) -> None:
    """Three steps; of the second the transfer runs from 3 to 9 ms beside backward from 2 to 6."""

    def event(name: str, category: str, begin: float, length: float) -> dict[str, Any]:
        return {
            "name": name,
            "cat": category,
            "ph": "X",
            "pid": 0,
            "ts": begin * 1000,
            "dur": length * 1000,
            "args": {"bytes": 5000} if category == "transfer" else {},
        }

    iterations = [{"iteration": 10 + index, "ts": 20000.0 * index, "dur": 1000.0 * length}
            for index, length in enumerate((8, 10, 15))]  # fmt: skip
    events = [event("forward", "phase", 20, 2), event("backward", "phase", 22, 4),
              event("exchange", "phase", 26, 3), event("update", "phase", 29, 1),
              event("gradients", "transfer", 23, 6), event("forward", "phase", 40, 9)]  # fmt: skip
    path.write_text(json.dumps({"schema": 1, "rank": 0, "iterations": iterations,
                                "traceEvents": [{"ph": "M"}, *events]}))  # fmt: skip


def add_noise_samples(path: Path, samples: Sequence[NoiseSample]) -> None:
    """Add measurements of the gradient noise scale to the events of a run's rank 0."""
    columns = {name: [getattr(each, name) for each in samples] for name in SAMPLE_KEYS}
    events = path / "events-0.jsonl"
    *earlier, end = events.read_text().splitlines()
    lines = [*earlier, json.dumps({"event": "gradient_noise", "time": 0.0, **columns}), end]
    events.write_text("".join(f"{line}\n" for line in lines))
