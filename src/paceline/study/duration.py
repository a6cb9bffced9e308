"""Estimate how long cells take: from finished cells, or before that from a timed training step.

The estimate from a step covers compute and evaluation on CPUs. It excludes communication and the
start of a run, which is short because a study forks its processes from a warm one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from statistics import fmean
from time import perf_counter

import torch

from paceline.config import RunConfig
from paceline.config.cluster_spec import parse_recorded
from paceline.data import DATASETS
from paceline.data.dataset import DatasetInfo
from paceline.measure.machine import cores_usable
from paceline.models import MODELS
from paceline.models.build import build_model
from paceline.study.folder import Cell
from paceline.training.loss import cross_entropy

BATCH_SIZE = 8
"""Of the timed step."""
STEPS = 2
EVALUATION_COST = 1 / 3
"""Relative to a training step: only the forward pass."""


class DurationModel:
    """Estimates cells from a timed step of their models; measures each model once."""

    def __init__(self) -> None:
        self._sample_seconds: dict[tuple[str, DatasetInfo], float] = {}

    def seconds_of(self, config: RunConfig) -> float | None:
        """Estimate a run; None for user-defined models and data, and on GPUs."""
        if config.data not in DATASETS or config.model not in MODELS:
            return None
        if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
            return None
        outline = getattr(DATASETS.load(config.data), "outline", None)
        if not isinstance(outline, DatasetInfo):
            return None
        if outline.has_tokens and config.context is not None:
            outline = dataclasses.replace(outline, sample_shape=(config.context,))
        on_one_core = self._seconds_per_sample(config, outline)
        sample_seconds = on_one_core / speed(config, cores_usable())
        return samples_per_worker(config, outline) * sample_seconds

    def _seconds_per_sample(self, config: RunConfig, outline: DatasetInfo) -> float:
        key = (config.model_text, outline)
        if key not in self._sample_seconds:
            self._sample_seconds[key] = time_sample(config, outline)
        return self._sample_seconds[key]


def samples_per_worker(config: RunConfig, outline: DatasetInfo) -> float:
    """Training samples per worker; evaluated samples count with their relative cost."""
    train = config.train_samples or outline.train_samples
    test = config.test_samples or outline.test_samples
    per_epoch = max(1, math.ceil(train / config.global_batch_size))
    iterations = config.iterations_in_total(per_epoch)
    every = per_epoch if config.eval_every == "epoch" else config.eval_every
    evaluations = 1 if every == "never" else max(1, iterations // every)
    trained = iterations * min(config.global_batch_size, train)
    return (trained + EVALUATION_COST * evaluations * test) / config.workers


def speed(config: RunConfig, cores: int) -> float:
    """Return how many cores a worker can use."""
    spec = parse_recorded(config.cluster) if config.cluster else None
    # Emulated nodes share the cores of this machine.
    on_machine = config.workers if spec else config.nproc_per_node
    share = cores / on_machine
    threads = min(config.threads or max(1.0, share), share)
    quota = spec.cpus_of(config.node_rank, cores) if spec else None
    return threads if quota is None else min(threads, quota / config.nproc_per_node)


def time_sample(config: RunConfig, outline: DatasetInfo) -> float:
    """Seconds of a forward and backward pass on one core, per sample; best of a few steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        network = build_model(
            config.model,
            outline.sample_shape,
            outline.classes,
            seed=0,
            options=config.model_options,
            has_tokens=outline.has_tokens,
        )
        inputs = torch.zeros(BATCH_SIZE, *outline.sample_shape)
        targets = torch.zeros(BATCH_SIZE, dtype=torch.int64)
        if outline.has_tokens:
            inputs = targets = torch.zeros_like(inputs, dtype=torch.int64)
        best = math.inf
        for step in range(STEPS + 1):
            begin = perf_counter()
            cross_entropy(network(inputs), targets).backward()
            if step:
                best = min(best, perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    return best / BATCH_SIZE


def seconds_of(cell: Cell, cells: Iterable[Cell]) -> float | None:
    """Mean over its finished repeats, else over its part, else over all cells; None: unknown."""
    timed = [other for other in cells if other.elapsed_seconds is not None]
    candidates = (
        [other for other in timed if other.group == cell.group],
        [other for other in timed if other.part == cell.part],
        timed,
    )
    for others in candidates:
        if others:
            return fmean(other.elapsed_seconds or 0.0 for other in others)
    return None


def seconds_of_all(cells: Iterable[Cell], known: Iterable[Cell]) -> float | None:
    """Total of `cells`; None if one of them is unknown."""
    known = list(known)
    each = [seconds_of(cell, known) for cell in cells]
    estimates = [seconds for seconds in each if seconds is not None]
    return sum(estimates) if len(estimates) == len(each) else None
