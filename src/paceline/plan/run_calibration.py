"""Calibration from existing records: runs of any kind, and files of `paceline comm --json`.

Compute times come from phases that no strategy overlaps with communication. Runs with several
workers also correct the model for their strategy (corrections.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from paceline.analysis.collection import collect
from paceline.analysis.contention import other_processes_share
from paceline.analysis.events import read_iterations
from paceline.analysis.run import Run
from paceline.analysis.validation import is_number
from paceline.config import non_default_values, to_argv
from paceline.errors import MissingMeasurementError, UsageError
from paceline.plan.calibration import (
    COMPUTE_PHASES,
    KIND,
    OVERLAPPING,
    UPDATES_ELSEWHERE,
    Calibration,
    CodecTiming,
    CollectiveTiming,
    ComputePoint,
    Gradient,
    MeasuredRun,
    SizePoint,
)
from paceline.plan.codec_cost import plannable_codecs
from paceline.plan.comm_records import codec_timings, comm_cpu, comm_timings, merged
from paceline.plan.host_sharing import read_side_by_side
from paceline.plan.learning import learning_of
from paceline.plan.links import Link
from paceline.plan.recorded_job import RecordedJob, why_unplannable
from paceline.plan.strategy_options import is_modeled
from paceline.records import read_json

COMPUTE_SETTINGS = ("precision", "accumulate", "compile", "optimizer")
"""Settings that change the compute time of a step."""
TASK_SETTINGS = ("data", "model_options", "context", "augment", "momentum", "threads")
"""Other settings that a recommended command repeats."""
MOST_STEPS = 500
"""Step times that are kept of a run."""
SMALL_BYTES, LARGE_BYTES = 2**10, 2**20
"""Sizes that stand for a measured latency and bandwidth."""
OPTIMIZER_COPIES = {"adam": 2, "adamw": 2, "muon": 1}
"""Optimizer state relative to the weights; of SGD it depends on the momentum."""


@dataclass(frozen=True, slots=True)
class PlanRecords:
    """What plans are made from, as it is on disk."""

    paths: Sequence[str]
    runs: list[Run]
    files: list[tuple[str, Mapping[str, Any]]]
    """Records of `paceline comm`, or a calibration, by name."""
    notes: list[str]
    """Runs that cannot be read or planned from, and why."""


def read_records(paths: Sequence[str]) -> PlanRecords:
    """Read runs, folders of runs, studies, `paceline comm` records or a calibration."""
    found = PlanRecords(paths, [], [], [])
    for path in paths:
        if Path(path).is_file():
            found.files.append((path, read_json(Path(path))))
            continue
        collection = collect(path)
        found.runs.extend(collection.runs)
        found.files.extend((str(file), read_json(file)) for file in collection.comm)
        found.notes.extend(f"{one.name}: {one.reason}" for one in collection.skipped)
        problems = [(run, why_unplannable(RecordedJob(run))) for run in collection.runs]
        found.notes.extend(f"{run.id} is left out: {text}" for run, text in problems if text)
    return found


def calibrate(paths: Sequence[str], model: str | None = None) -> Calibration:
    """As `calibrate_records`, of what is at these paths."""
    return calibrate_records(read_records(paths), model)


def calibrate_records(records: PlanRecords, model: str | None = None) -> Calibration:
    """UsageError if records do not describe one model on one kind of machine.

    `model` selects one.
    """
    calibrations = [one for one in records.files if one[1].get("kind") == KIND]
    if calibrations:
        path, record = calibrations[0]
        if len(records.files) > 1 or records.runs:
            raise UsageError(f"{path} is a calibration: give it alone")
        known = Calibration.from_dict(record, path)
        if model not in (None, known.model):
            raise UsageError(f"--model {model}: {path} is a calibration of {known.model}")
        return known
    found = calibrate_runs([RecordedJob(run) for run in records.runs], records.files, model)
    side_by_side = (read_side_by_side(Path(path), found.model) for path in records.paths)
    return replace(found, side_by_side=next(filter(None, side_by_side), ()))


def calibrate_runs(
    runs: Sequence[RecordedJob],
    comm_records: Sequence[tuple[str, Mapping[str, Any]]],
    model: str | None = None,
) -> Calibration:
    """As `calibrate`, of runs and named records of `paceline comm` that were read before."""
    collectives = merged(one for name, each in comm_records for one in comm_timings(each, name))
    codecs = merged(one for name, each in comm_records for one in codec_timings(each, name))
    jobs = _jobs(runs, model)
    _check_same([job.model_text for job in jobs], "models", "--model NAME")
    _check_same([str(job.run.settings.get("data")) for job in jobs], "data", "runs of one dataset")
    _check_same([job.machine for job in jobs], "machines", "runs of one machine only")
    threads = [str(job.threads or "all") for job in jobs if job.threads or not job.is_script]
    change = "runs with the same --threads, or scripts with the same OMP_NUM_THREADS"
    _check_same(threads, "numbers of threads", change)
    # The arguments of a script may select another model.
    sizes = [job.tensor_bytes or job.bucket_bytes for job in jobs if job.is_script]
    models = [f"{jobs[0].model} with {sum(each):,} bytes of gradients" for each in sizes if each]
    _check_same(models, "models", "runs of one model")
    for name in COMPUTE_SETTINGS:
        values = [f"--{name} {job.run.settings.get(name)}" for job in jobs]
        _check_same(values, "settings", "runs with the same settings")
    of_records = (comm_cpu(record, name) for name, record in comm_records)
    cpus = [str(cpu) for cpu in (*map(_cpu, jobs), *of_records) if cpu is not None]
    _check_same(cpus, "machines", "runs and records of `paceline comm` of one kind of machine")
    return _calibration(jobs, collectives, codecs)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Runs that predictions are compared with."""

    runs: list[MeasuredRun]
    other_processes_share: float | None
    """As that of a calibration."""


def read_measured_runs(paths: Sequence[str], calibration: Calibration) -> HeldOut:
    """Read runs that the calibration is not made from."""
    planned_from = {*calibration.sources}
    runs = [
        RecordedJob(run)
        for path in paths
        for run in collect(path).runs
        if str(run.folder.path) not in planned_from
    ]
    if paths and not runs:
        raise UsageError("--against: the plan is made from all of these runs: give others")
    jobs = _jobs(runs, None, "--against: ")
    models = [job.model for job in jobs]
    _check_same([calibration.model, *models], "models", "--against runs of the same model")
    planned = str(calibration.hardware.get("cpu"))
    cpus = [str(_cpu(job)) for job in jobs]
    _check_same([planned, *cpus], "machines", "--against runs of the same machine")
    for settings in (_settings(job.run) for job in jobs):
        # Runs that do not say how many threads they had may have had the same number.
        names = {*calibration.settings, *settings}
        names -= {"threads"} - (calibration.settings.keys() & settings.keys())
        both = [
            shlex.join(to_argv({name: each[name] for name in sorted(names) if name in each}))
            for each in (calibration.settings, settings)
        ]
        texts = [text or "the defaults" for text in both]
        _check_same(texts, "settings", "--against runs with the same settings")
    codecs = plannable_codecs(calibration.codec_timings, calibration.gradients)
    measured = [
        _measured_on_link(job, calibration.links())
        for job in jobs
        if is_modeled(job.run.settings.options, codecs)
    ]
    return HeldOut(measured, _other_processes_share([job.run for job in jobs]))


def _cpu(job: RecordedJob) -> Any:
    return (job.run.result or {}).get("hardware", {}).get("cpu")


def _measured_on_link(job: RecordedJob, links: Sequence[Link]) -> MeasuredRun:
    """On several real hosts, the link is that of the records of `paceline comm`, if it is one."""
    run = job.measured()
    is_unknown = run.hosts > 1 and run.link is None and not job.run.settings.cluster
    return replace(run, link=links[0]) if is_unknown and len(links) == 1 else run


def _jobs(runs: Sequence[RecordedJob], model: str | None, flag: str = "") -> list[RecordedJob]:
    """The runs that can be planned from; UsageError if there are none."""
    problems = [why_unplannable(job) for job in runs]
    jobs = [job for job, problem in zip(runs, problems, strict=True) if not problem]
    chosen = [job for job in jobs if model in (None, job.model)]
    if chosen:
        return chosen
    if jobs:
        names = sorted({job.model for job in jobs})
        raise UsageError(f"--model {model}: there are runs of {', '.join(names)} only")
    if runs:
        raise UsageError(f"{flag}cannot plan from {runs[0].run.id}: {problems[0]}")
    raise UsageError(f"{flag}cannot plan: there is no run: add one with one worker")


def _check_same(values: Sequence[str], what: str, change: str) -> None:
    different = sorted(set(values))
    if len(different) > 1:
        raise UsageError(
            f"cannot plan from different {what}: {' and '.join(different[:2])}: give {change}"
        )


def _calibration(
    jobs: Sequence[RecordedJob],
    collectives: Sequence[CollectiveTiming],
    codecs: Sequence[CodecTiming],
) -> Calibration:
    runs = [job.run for job in jobs]
    first = runs[0].result or {}
    gradients, has_ready_times, has_tensor_sizes = _gradients(jobs)
    # Codecs import torch, which reports without them need not wait for.
    has_codecs = any("codec" in run.settings.options for run in runs)
    links = [*dict.fromkeys(one.link for one in collectives if one.hosts > 1 and one.link)]
    plannable = plannable_codecs(codecs, gradients) if has_codecs else ()
    return Calibration(
        model=jobs[0].model,
        gradients=gradients,
        compute=_compute_points(jobs),
        residuals=tuple(_relative(_step_seconds(job.run, 0)) for job in jobs if job.workers == 1),
        collectives=tuple(collectives or _bucket_collectives(jobs, gradients)),
        codec_timings=tuple(codecs),
        cores_per_worker=_cores_per_worker(jobs),
        runs=tuple(
            _measured_on_link(job, links)
            for job in jobs
            if job.workers > 1 and is_modeled(job.run.settings.options, plannable)
        ),
        optimizer_state_bytes=_state_bytes(runs[0], sum(each.size_bytes for each in gradients)),
        activation_bytes_per_sample=_activation_bytes(jobs),
        learning=learning_of(runs),
        clusters=tuple(dict.fromkeys(text for job in jobs if (text := job.cluster))),
        has_ready_times=has_ready_times,
        has_tensor_sizes=has_tensor_sizes,
        script=jobs[0].model if jobs[0].is_script else None,
        script_words={
            str(job.samples): tuple(job.run.settings.script_words) for job in jobs if job.is_script
        },
        other_processes_share=_other_processes_share(runs),
        settings=_settings(runs[0]),
        hardware=first.get("hardware", {}),
        software=first.get("software", {}),
        sources=tuple(str(run.folder.path) for run in runs),
    )


def _settings(run: Run) -> dict[str, Any]:
    """Settings that the job consists of, where they differ from the defaults."""
    if run.settings.config is None:
        return {}
    given = non_default_values(run.settings.config)
    return {name: given[name] for name in (*TASK_SETTINGS, *COMPUTE_SETTINGS) if name in given}


def _bucket_collectives(
    jobs: Sequence[RecordedJob], gradients: Sequence[Gradient]
) -> Iterator[CollectiveTiming]:
    """What `overlap` measured to tune its buckets, where `paceline comm` was not run."""
    for job in jobs:
        if (measured := job.bucket_measurements) is not None:
            sizes = (SMALL_BYTES, max(LARGE_BYTES, sum(each.size_bytes for each in gradients)))
            points = (
                SizePoint(size, (measured.latency_seconds + size * measured.seconds_per_byte,))
                for size in sizes
            )
            algorithm = job.options.get("algorithm", "library")
            yield CollectiveTiming(
                job.backend, "all_reduce", algorithm, job.workers, job.hosts, job.link,
                tuple(points),
            )  # fmt: skip


def _compute_points(jobs: Sequence[RecordedJob]) -> tuple[ComputePoint, ...]:
    """One point per local batch; runs with one worker first, since nothing disturbs them."""
    chosen: dict[int, list[RecordedJob]] = {}
    alone = [job for job in jobs if job.strategy not in OVERLAPPING]
    # Runs that timed a backward pass without communication stand in for these.
    alone = alone or [job for job in jobs if job.bucket_measurements]
    for count in sorted({job.workers for job in alone}):
        same = [job for job in alone if job.workers == count]
        for samples in {job.samples for job in same} - chosen.keys():
            chosen[samples] = [job for job in same if job.samples == samples]
    update = _update_seconds(jobs)
    points = []
    for samples, same in sorted(chosen.items()):
        means = {name: fmean(_compute_phases(job)[name] for job in same) for name in COMPUTE_PHASES}
        if update is not None and all(job.strategy in UPDATES_ELSEWHERE for job in same):
            means["update"] = update
        steps = [second for job in same if job.workers == 1 for second in _step_seconds(job.run, 0)]
        points.append(ComputePoint(samples, means, tuple(steps)))
    return tuple(point for point in points if point.seconds > 0)


def _compute_phases(job: RecordedJob) -> Mapping[str, float]:
    measured = job.bucket_measurements
    if job.strategy not in OVERLAPPING or measured is None:
        return job.phases
    return {**job.phases, "backward": measured.backward_seconds}


def _update_seconds(jobs: Sequence[RecordedJob]) -> float | None:
    """Of workers that update all weights."""
    known = [job.phases["update"] for job in jobs if job.strategy not in UPDATES_ELSEWHERE]
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


def _gradients(jobs: Sequence[RecordedJob]) -> tuple[tuple[Gradient, ...], bool, bool]:
    """Sizes and ready times, and whether these and the sizes of tensors were measured."""
    tensors = next((found for job in jobs if (found := job.tensor_bytes)), None)
    sizes = tensors or next((found for job in jobs if (found := job.bucket_bytes)), None)
    if sizes is None and jobs[0].is_script:
        raise MissingMeasurementError(
            "the size of the gradients", "a profile with DistributedDataParallel"
        )
    if sizes is None:
        raise UsageError(
            "cannot plan: these runs were recorded before tensor sizes were: run one of them again"
        )
    ready = next((times for job in jobs if (times := _ready(job, len(sizes)))), None)
    # Gradients are ready in about the reverse order of the model.
    count = len(sizes)
    times = ready[::-1] if ready else [(count - index) / count for index in range(count)]
    same = (job.tensor_shapes for job in jobs if job.tensor_bytes == tensors)
    shapes: Sequence[tuple[int, ...] | None]
    shapes = next((found for found in same if found), [None] * count)
    gradients = tuple(map(Gradient, sizes, times, shapes))
    return gradients, ready is not None, tensors is not None


def _ready(job: RecordedJob, count: int) -> list[float] | None:
    """From the measured steps of `overlap`: fractions of the backward pass, ascending."""
    measured = job.bucket_measurements
    if measured is None or len(measured.ready_seconds) != count:
        return None
    total = measured.backward_seconds
    return [min(max(each / total, 0.0), 1.0) for each in measured.ready_seconds]


def measured_run(run: Run) -> MeasuredRun:
    return RecordedJob(run).measured()


def _cores_per_worker(jobs: Sequence[RecordedJob]) -> float | None:
    hardware = (jobs[0].run.result or {}).get("hardware", {})
    threads, cores = jobs[0].threads, hardware.get("cores")
    fewest = min(job.workers for job in jobs)
    if threads:
        return float(threads)
    return cores / fewest if is_number(cores) else None


def _state_bytes(run: Run, weights_bytes: int) -> int:
    optimizer = str(run.settings.get("optimizer"))
    momentum = bool(run.settings.get("momentum"))
    return OPTIMIZER_COPIES.get(optimizer, int(momentum)) * weights_bytes


def _other_processes_share(runs: Sequence[Run]) -> float | None:
    return max(filter(None, map(other_processes_share, runs)), default=None)


def _activation_bytes(jobs: Sequence[RecordedJob]) -> float | None:
    for job in jobs:
        memory = job.run.workers[0].get("memory") or {}
        setup, forward = memory.get("setup_bytes"), memory.get("forward_bytes")
        if is_number(setup) and is_number(forward) and forward > setup:
            return (forward - setup) / job.samples
    return None
