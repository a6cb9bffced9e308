"""What a plan takes from a run, whatever started it.

`paceline train` recorded all settings. A loop that called `paceline.join` recorded its strategy and
tensor sizes. A profiled script has neither: its strategy is that of DistributedDataParallel, whose
buckets stand for tensors. Batches of both scripts follow from the samples that were counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

import numpy as np

from paceline.analysis.run import Run
from paceline.analysis.script.profile import read_script_profile
from paceline.analysis.validation import is_number
from paceline.config import cluster_spec
from paceline.plan.calibration import MeasuredRun
from paceline.plan.comm_records import backend_of
from paceline.plan.links import Link, link_of_cluster
from paceline.plan.strategy_options import without_defaults


def why_unplannable(job: RecordedJob) -> str:
    """What is wrong with a run, and what to change; empty if it can be planned from."""
    run = job.run
    if not run.is_finished:
        return "it did not finish: run it again"
    if run.iteration_seconds is None or not run.workers:
        return "it has no two iterations: train longer"
    if run.is_resized:
        return "its number of workers changed: give a run with a constant one"
    # Emulated slow workers and unequal shares are no property of the job.
    if run.settings.get("slow") or run.settings.get("shares"):
        return (
            "its workers were slowed down or have unequal shares: run it without --slow, --shares"
        )
    if any(worker_phases(worker) is None for worker in run.workers):
        return "it was recorded by an older version: run it again"
    if job.is_script and not job.samples:
        return "the samples of a step were not counted: iterate over a DataLoader in the script"
    if run.settings.kind == "profile" and job.workers > 1 and not job.ddp:
        return (
            "its workers do not use DistributedDataParallel: profile it with one worker, or plan"
            " from a loop with `paceline.join`"
        )
    if any(model.get("has_communication_hook") for model in job.ddp):
        return "it has a communication hook, whose time is not known: profile it without"
    return ""


@dataclass(frozen=True, slots=True)
class BucketMeasurements:
    """Steps whose gradients are all-reduced after the backward pass."""

    backward_seconds: float
    latency_seconds: float
    seconds_per_byte: float
    """Of an all-reduce between the workers of the run."""
    ready_seconds: tuple[float, ...]
    """When the gradients are ready, ascending."""


@dataclass(frozen=True)
class RecordedJob:
    """A run as a plan sees it."""

    run: Run
    keeps_defaults: bool = False
    """Whether `options` has those that equal their defaults: to tell them takes importing torch."""

    @property
    def is_script(self) -> bool:
        return self.run.settings.kind != "train"

    @property
    def model(self) -> str:
        """The model, or the script that defines it; `--model` selects by it."""
        settings = self.run.settings
        return str(settings.script if self.is_script else settings.get("model"))

    @property
    def model_text(self) -> str:
        """The model with its options."""
        return self.run.settings.model_text or self.model

    @property
    def workers(self) -> int:
        return len(self.run.workers) if self.is_script else self.run.settings.workers

    @property
    def hosts(self) -> int:
        if self.run.settings.kind == "profile":
            return len({worker.get("node") for worker in self.run.workers}) or 1
        return self.run.settings.nnodes

    @property
    def strategy(self) -> str:
        if self.workers == 1:
            return "single"
        return "ddp" if self.run.settings.kind == "profile" else str(self.run.settings.strategy)

    @cached_property
    def options(self) -> dict[str, str]:
        """Of the strategy, as in MeasuredRun."""
        options = {key: str(value) for key, value in self.run.settings.options.items()}
        if self.ddp and self.workers > 1 and is_number(cap := self.ddp[0].get("bucket_cap_bytes")):
            options = {"bucket_mib": f"{cap / 2**20:g}"}
            # The default, for which no class need be loaded.
            if options["bucket_mib"] == "25":
                return {}
        return options if self.keeps_defaults else without_defaults(self.strategy, options)

    @property
    def ddp(self) -> list[Mapping[str, Any]]:
        """The DistributedDataParallel models of a profiled script."""
        found = self.run.workers[0].get("ddp") if self.run.workers else None
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []

    @property
    def link(self) -> Link | None:
        cluster = self.run.settings.cluster
        return link_of_cluster(cluster_spec.parse_recorded(cluster)) if cluster else None

    @property
    def cluster(self) -> str | None:
        """The emulated nodes of a run with several workers, without their number."""
        parts = (self.run.settings.cluster or "").split(",")
        kept = ",".join(part for part in parts if not part.strip().startswith("nodes="))
        return kept if kept and self.workers > 1 else None

    @property
    def backend(self) -> Literal["gloo", "nccl", "shm", "hierarchical"]:
        communicator = str(self.run.settings.get("communicator") or "torch")
        if self.strategy == "shared":
            communicator = "shm"  # whatever exchanges other tensors
        return backend_of(communicator, self.hosts, self._has_own_gpus)

    @property
    def _has_own_gpus(self) -> bool:
        gpus = (self.run.result or {}).get("hardware", {}).get("gpus") or []
        if self.run.settings.kind == "profile":
            is_on_gpu = any(
                rank.samples and rank.samples[-1].gpu_bytes
                for rank in read_script_profile(self.run).ranks
            )
        else:
            is_on_gpu = self.run.cuda_graph is not None
        return is_on_gpu and len(gpus) >= self.workers // self.hosts

    @cached_property
    def samples(self) -> int:
        """Samples of a worker in a full step; 0 if unknown."""
        batch = self.run.settings.global_batch_size
        if not self.is_script:
            return -(-(batch or 1) // self.workers)
        counts = [worker.get("samples") for worker in self.run.workers]
        most = max((count for count in counts if is_number(count)), default=0)
        # The last batch of an epoch may be smaller.
        return math.ceil(most / self.run.iterations) if self.run.iterations else 0

    @property
    def global_samples(self) -> int | None:
        """Of the workers together; None if they have as many each."""
        batch = self.run.settings.global_batch_size
        return None if self.is_script or not batch or batch % self.workers == 0 else batch

    @cached_property
    def threads(self) -> int | None:
        """Of a worker; None if it was neither set nor recorded."""
        if self.run.settings.kind != "profile":
            return self.run.settings.threads
        ranks = read_script_profile(self.run).ranks
        return ranks[0].threads if ranks else None

    @property
    def machine(self) -> str:
        """What compute times depend on, besides the model, the batch and the threads."""
        hardware = (self.run.result or {}).get("hardware", {})
        gpus = ", ".join(str(gpu.get("name")) for gpu in hardware.get("gpus") or [])
        parts = [f"{hardware.get('cpu')} with {hardware.get('cores')} cores"]
        parts += [gpus] if gpus and self.run.settings.get("device") != "cpu" else []
        if self.run.settings.cluster:
            cpus = cluster_spec.parse_recorded(self.run.settings.cluster).cpus
            parts.append(f"cpus={cpus:g}" if cpus else "no CPU quota")
        return ", ".join(parts)

    @cached_property
    def phases(self) -> dict[str, float]:
        """Mean seconds of a step by phase, without the first step."""
        found = [worker_phases(worker) or {} for worker in self.run.workers]
        means = {name: fmean(each[name] for each in found) for name in found[0]}
        if self.is_script:
            # Batches that are made without a DataLoader, copies and logging are in no phase.
            steps = [worker["iteration_seconds"]["mean"] for worker in self.run.workers]
            means["input"] += max(0.0, fmean(steps) - math.fsum(means.values()))
        return means

    def measured(self) -> MeasuredRun:
        workers = self.run.workers
        hidden = (each["after_first"].get("hidden_exchange_seconds") or 0.0 for each in workers)
        blocks = self.run.timing.blocks if self.run.timing else []
        deviation = 0.0
        if len(blocks) > 1:
            deviation = float(np.std(blocks, ddof=1) / np.mean(blocks) / math.sqrt(len(blocks)))
        return MeasuredRun(
            strategy=self.strategy,
            options=self.options,
            backend=self.backend,
            workers=self.workers,
            hosts=self.hosts,
            link=self.link,
            samples=self.samples,
            batch_size=self.global_samples,
            step_seconds=float(self.run.iteration_seconds or 0.0),
            phases=self.phases,
            hidden_exchange_seconds=fmean(hidden) / workers[0]["after_first"]["iterations"],
            deviation=deviation,
            name=str(self.run.folder.path),
        )

    @property
    def bucket_measurements(self) -> BucketMeasurements | None:
        """Of `overlap`, which tunes its buckets in the first steps; None if it did not."""
        buckets = self.run.workers[0].get("buckets") if self.run.workers else None
        found = (buckets or {}).get("measurements") or {}
        ready = found.get("ready_seconds")
        backward, latency, per_byte = (
            float(value) if is_number(value := found.get(name)) else -1.0
            for name in ("backward_seconds", "latency_seconds", "seconds_per_byte")
        )
        if not isinstance(ready, list) or not all(map(is_number, ready)):
            return None
        if backward <= 0 or min(latency, per_byte) < 0:
            return None
        return BucketMeasurements(backward, latency, per_byte, tuple(map(float, ready)))

    @property
    def tensor_bytes(self) -> list[int] | None:
        """In the order of the model; None if it was not recorded."""
        found = self.run.workers[0].get("tensor_bytes") if self.run.workers else None
        return _sizes(found)

    @property
    def tensor_shapes(self) -> list[tuple[int, ...]] | None:
        """In the order of `tensor_bytes`; None if they were not recorded."""
        sizes = self.tensor_bytes
        found = self.run.workers[0].get("tensor_shapes") if sizes else None
        if not sizes or not isinstance(found, list) or len(found) != len(sizes):
            return None
        is_valid = all(
            (each == [] or _sizes(each)) and size % math.prod(each) == 0
            for each, size in zip(found, sizes, strict=True)
        )
        return [*map(tuple, found)] if is_valid else None

    @property
    def bucket_bytes(self) -> list[int] | None:
        """Of DistributedDataParallel, in the order of the model: the first bucket has its end."""
        buckets = [
            size for model in self.ddp for size in reversed(_sizes(model.get("bucket_bytes")) or [])
        ]
        return buckets or None


def worker_phases(worker: Mapping[str, Any]) -> dict[str, float] | None:
    """Seconds per step after the first, by phase; None for older results."""
    later = worker.get("after_first")
    if not later or not later["iterations"]:
        return None
    return {name: spent / later["iterations"] for name, spent in later["phases"].items()}


def _sizes(values: Any) -> list[int] | None:
    """None unless these are sizes of tensors."""
    is_valid = isinstance(values, list) and all(
        isinstance(size, int) and 0 < size < 2**53 for size in values
    )
    return values if values and is_valid else None
