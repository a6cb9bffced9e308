"""Calibration from existing records: runs of any strategy, and files of `paceline comm --json`.

Compute times come from phases that no strategy overlaps with communication. Runs with several
workers also correct the model for their strategy (prediction.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from paceline.analysis.collection import collect
from paceline.analysis.contention import other_processes_share
from paceline.analysis.events import read_iterations
from paceline.analysis.run import Run
from paceline.analysis.validation import is_number
from paceline.config import cluster_spec
from paceline.errors import UsageError
from paceline.plan.calibration import (
    COMPUTE_PHASES,
    KIND,
    Calibration,
    CodecTiming,
    CollectiveTiming,
    ComputePoint,
    Contention,
    Gradient,
    MeasuredRun,
)
from paceline.plan.comm_records import backend_of, codec_timings, comm_timings
from paceline.plan.learning import learning_of
from paceline.plan.links import Link, link_of_cluster
from paceline.plan.strategy_options import is_modeled, without_defaults
from paceline.records import read_json

OVERLAPPING = ("overlap", "ddp", "fsdp")
"""Strategies whose backward pass includes communication."""
UPDATES_ELSEWHERE = ("sharded", "shared", "parameter_server", "fsdp")
"""Strategies whose workers do not update all weights."""
COMPUTE_SETTINGS = ("precision", "accumulate", "compile", "optimizer")
"""Settings that change the compute time of a step."""
MOST_STEPS = 500
"""Step times that are kept of a run."""
OPTIMIZER_COPIES = {"adam": 2, "adamw": 2, "muon": 1}
"""Optimizer state relative to the weights; of SGD it depends on the momentum."""


def calibrate(paths: Sequence[str], model: str | None = None) -> Calibration:
    """Read runs, folders of runs, studies, `paceline comm` records or a calibration.

    UsageError if they do not describe one model on one kind of machine; `model` selects one.
    """
    runs: list[Run] = []
    records: list[tuple[str, Mapping[str, Any]]] = []
    for path in paths:
        if Path(path).is_file():
            records.append((path, read_json(Path(path))))
            continue
        collection = collect(path)
        runs += collection.runs
        records += [(str(file), read_json(file)) for file in collection.comm]
    calibrations = [one for one in records if one[1].get("kind") == KIND]
    if calibrations:
        if len(records) > 1 or runs:
            raise UsageError(f"{calibrations[0][0]} is a calibration: give it alone")
        return Calibration.from_dict(calibrations[0][1], calibrations[0][0])
    collectives = [one for name, record in records for one in comm_timings(record, name)]
    codecs = [one for name, record in records for one in codec_timings(record, name)]
    usable = _usable(runs, model)
    if not usable:
        raise UsageError(_why_unusable(runs, model))
    _check_same([run.settings.model_text or "" for run in usable], "models", "--model NAME")
    _check_same([str(run.settings.get("data")) for run in usable], "data", "runs of one dataset")
    _check_same([_machine(run) for run in usable], "machines", "runs of one machine only")
    for name in COMPUTE_SETTINGS:
        values = [f"--{name} {run.settings.get(name)}" for run in usable]
        _check_same(values, "settings", "runs with the same settings")
    return _calibration(usable, collectives, codecs)


def read_measured_runs(paths: Sequence[str], calibration: Calibration) -> list[MeasuredRun]:
    """Read runs that predictions of the calibration can be compared with."""
    runs = [run for path in paths for run in collect(path).runs]
    usable = _usable(runs, None)
    if not usable:
        raise UsageError(f"--against: {_why_unusable(runs, None)}")
    models = [str(run.settings.get("model")) for run in usable]
    _check_same([calibration.model, *models], "models", "--against runs of the same model")
    cpus = [str((run.result or {}).get("hardware", {}).get("cpu")) for run in usable]
    planned = str(calibration.hardware.get("cpu"))
    _check_same([planned, *cpus], "machines", "--against runs of the same machine")
    codecs = {timing.codec for timing in calibration.codec_timings}
    return [measured_run(run) for run in usable if is_modeled(run.settings.options, codecs)]


def _usable(runs: Iterable[Run], model: str | None) -> list[Run]:
    return [
        run
        for run in runs
        if run.is_finished
        and run.settings.kind == "train"
        and run.iteration_seconds is not None
        and not run.is_resized
        # Emulated slow workers and unequal shares are no property of the job.
        and not run.settings.get("slow")
        and not run.settings.get("shares")
        and (model is None or run.settings.get("model") == model)
        and all(_phases(worker) is not None for worker in run.workers)
    ]


def _why_unusable(runs: Sequence[Run], model: str | None) -> str:
    if model is not None and runs:
        names = sorted({str(run.settings.get("model")) for run in runs})
        return f"--model {model}: there are runs of {', '.join(names)} only"
    if any(run.settings.kind != "train" for run in runs):
        return "cannot plan from these runs: give finished runs of `paceline train`"
    return "cannot plan: no finished run with at least two iterations: add one with one worker"


def _check_same(values: Sequence[str], what: str, change: str) -> None:
    different = sorted(set(values))
    if len(different) > 1:
        raise UsageError(
            f"cannot plan from different {what}: {' and '.join(different[:2])}: give {change}"
        )


def _machine(run: Run) -> str:
    """What compute times depend on, besides the model and the batch."""
    hardware = (run.result or {}).get("hardware", {})
    gpus = ", ".join(str(gpu.get("name")) for gpu in hardware.get("gpus") or [])
    parts = [f"{hardware.get('cpu')} with {hardware.get('cores')} cores"]
    parts += [gpus] if gpus and run.settings.get("device") != "cpu" else []
    if run.settings.cluster:
        cpus = cluster_spec.parse_recorded(run.settings.cluster).cpus
        parts.append(f"cpus={cpus:g}" if cpus else "no CPU quota")
    parts.append(f"{run.settings.threads or 'all'} threads")
    return ", ".join(parts)


def _calibration(
    runs: Sequence[Run],
    collectives: Sequence[CollectiveTiming],
    codecs: Sequence[CodecTiming],
) -> Calibration:
    first = runs[0].result or {}
    gradients, has_ready_times = _gradients(runs)
    return Calibration(
        model=str(runs[0].settings.get("model")),
        gradients=gradients,
        compute=_compute_points(runs),
        residuals=tuple(
            _relative(_step_seconds(run, 0)) for run in runs if run.settings.workers == 1
        ),
        collectives=tuple(collectives),
        codec_timings=tuple(codecs),
        contention=Contention(cores_per_worker=_cores_per_worker(runs)),
        runs=tuple(
            measured_run(run)
            for run in runs
            if run.settings.workers > 1
            and is_modeled(run.settings.options, {timing.codec for timing in codecs})
        ),
        optimizer_state_bytes=_state_bytes(runs[0], sum(each.size_bytes for each in gradients)),
        activation_bytes_per_sample=_activation_bytes(runs),
        learning=learning_of(runs),
        has_ready_times=has_ready_times,
        other_processes_share=_other_processes_share(runs),
        hardware=first.get("hardware", {}),
        software=first.get("software", {}),
        sources=tuple(str(run.folder.path) for run in runs),
    )


def _phases(worker: Mapping[str, Any]) -> dict[str, float] | None:
    """Seconds per step after the first, by phase; None for older results."""
    later = worker.get("after_first")
    if not later or not later["iterations"]:
        return None
    return {name: spent / later["iterations"] for name, spent in later["phases"].items()}


def _mean_phases(run: Run) -> dict[str, float]:
    workers = [phases for worker in run.workers if (phases := _phases(worker))]
    return {name: fmean(each[name] for each in workers) for name in workers[0]}


def _samples(run: Run) -> int:
    """Samples of a worker in a full step."""
    return -(-(run.settings.global_batch_size or 1) // run.settings.workers)


def _compute_points(runs: Sequence[Run]) -> tuple[ComputePoint, ...]:
    """One point per local batch; runs with one worker first, since nothing disturbs them."""
    chosen: dict[int, list[Run]] = {}
    for count in sorted({run.settings.workers for run in runs}):
        same = [run for run in runs if run.settings.workers == count]
        batches = {_samples(run) for run in same if run.settings.strategy not in OVERLAPPING}
        for samples in batches - chosen.keys():
            chosen[samples] = [
                run
                for run in same
                if _samples(run) == samples and run.settings.strategy not in OVERLAPPING
            ]
    update = _update_seconds(runs)
    points = []
    for samples, same in sorted(chosen.items()):
        phases = [_mean_phases(run) for run in same]
        means = {name: fmean(each[name] for each in phases) for name in COMPUTE_PHASES}
        if update is not None and all(run.settings.strategy in UPDATES_ELSEWHERE for run in same):
            means["update"] = update
        steps = [
            second for run in same if run.settings.workers == 1 for second in _step_seconds(run, 0)
        ]
        points.append(ComputePoint(samples, means, tuple(steps)))
    return tuple(point for point in points if point.seconds > 0)


def _update_seconds(runs: Sequence[Run]) -> float | None:
    """Of workers that update all weights."""
    known = [
        _mean_phases(run)["update"]
        for run in runs
        if run.settings.strategy not in UPDATES_ELSEWHERE
    ]
    return fmean(known) if known else None


def _step_seconds(run: Run, rank: int) -> tuple[float, ...]:
    """Step times without the first; at most MOST_STEPS, evenly spaced."""
    events = read_iterations(run.folder.events_file(rank))
    seconds = events.seconds[1:] if events.blocks else np.zeros(0)
    kept = seconds[:: -(-len(seconds) // MOST_STEPS) or 1]
    return tuple(float(each) for each in kept)


def _relative(seconds: Sequence[float]) -> tuple[float, ...]:
    mean = fmean(seconds) if seconds else 1.0
    return tuple(each / mean for each in seconds)


def _gradients(runs: Sequence[Run]) -> tuple[tuple[Gradient, ...], bool]:
    """Sizes and ready times, and whether these were measured."""
    sizes = next((found for run in runs if (found := _tensor_bytes(run))), None)
    if sizes is None:
        raise UsageError(
            "cannot plan: these runs were recorded before tensor sizes were: run one of them again"
        )
    ready = next((times for run in runs if (times := _ready(run, len(sizes)))), None)
    if ready is None:
        # Gradients are ready in about the reverse order of the model.
        uniform = [(len(sizes) - index) / len(sizes) for index in range(len(sizes))]
        return tuple(map(Gradient, sizes, uniform)), False
    return tuple(map(Gradient, sizes, reversed(ready))), True


def _tensor_bytes(run: Run) -> list[int] | None:
    found = run.workers[0].get("tensor_bytes") if run.workers else None
    is_valid = isinstance(found, list) and all(
        isinstance(size, int) and 0 < size < 2**53 for size in found
    )
    return found if found and is_valid else None


def _ready(run: Run, count: int) -> list[float] | None:
    """From the measured steps of `overlap`: fractions of the backward pass, ascending."""
    buckets = next((worker.get("buckets") for worker in run.workers), None) or {}
    measured = buckets.get("measurements") or {}
    seconds, total = measured.get("ready_seconds"), measured.get("backward_seconds")
    if not isinstance(seconds, list) or len(seconds) != count or not is_number(total) or not total:
        return None
    if not all(map(is_number, seconds)):
        return None
    return [min(max(each / total, 0.0), 1.0) for each in seconds]


def measured_run(run: Run) -> MeasuredRun:
    settings, workers = run.settings, run.workers
    hidden = [(worker["after_first"].get("hidden_exchange_seconds") or 0.0) for worker in workers]
    steps = workers[0]["after_first"]["iterations"]
    blocks = run.timing.blocks if run.timing else []
    deviation = 0.0
    if len(blocks) > 1:
        deviation = float(np.std(blocks, ddof=1) / np.mean(blocks) / math.sqrt(len(blocks)))
    return MeasuredRun(
        strategy=str(settings.strategy),
        options=without_defaults(
            str(settings.strategy), {key: str(value) for key, value in settings.options.items()}
        ),
        backend=backend_of(str(settings.get("communicator")), settings.nnodes, _has_own_gpus(run)),
        workers=settings.workers,
        hosts=settings.nnodes,
        link=_link(settings.cluster),
        samples=_samples(run),
        step_seconds=float(run.iteration_seconds or 0.0),
        phases=_mean_phases(run),
        hidden_exchange_seconds=fmean(hidden) / steps,
        deviation=deviation,
        name=str(run.folder.path),
    )


def _has_own_gpus(run: Run) -> bool:
    gpus = (run.result or {}).get("hardware", {}).get("gpus") or []
    per_host = run.settings.workers // run.settings.nnodes
    return run.cuda_graph is not None and len(gpus) >= per_host


def _link(cluster: str | None) -> Link | None:
    return link_of_cluster(cluster_spec.parse_recorded(cluster)) if cluster else None


def _cores_per_worker(runs: Sequence[Run]) -> float | None:
    hardware = (runs[0].result or {}).get("hardware", {})
    threads, cores = runs[0].settings.threads, hardware.get("cores")
    fewest = min(run.settings.workers for run in runs)
    if threads:
        return float(threads)
    return cores / fewest if is_number(cores) else None


def _state_bytes(run: Run, weights_bytes: int) -> int:
    optimizer = str(run.settings.get("optimizer"))
    momentum = bool(run.settings.get("momentum"))
    return OPTIMIZER_COPIES.get(optimizer, int(momentum)) * weights_bytes


def _other_processes_share(runs: Sequence[Run]) -> float | None:
    return max(filter(None, map(other_processes_share, runs)), default=None)


def _activation_bytes(runs: Sequence[Run]) -> float | None:
    for run in runs:
        memory = run.workers[0].get("memory") or {}
        setup, forward = memory.get("setup_bytes"), memory.get("forward_bytes")
        if is_number(setup) and is_number(forward) and forward > setup:
            return (forward - setup) / _samples(run)
    return None
