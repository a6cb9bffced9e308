"""A first guess at what a cell takes, before any is done: by a step of its model on this machine.

It knows of computing, of evaluating and of starting processes. What workers take to communicate,
and what a GPU saves, shows when the first cell is done: then cells are estimated by those.

How long cells will take, by those that are done."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable
from statistics import fmean
from time import perf_counter

import torch
import torch.nn.functional as F

from paceline.config import RunConfig
from paceline.config.cluster_spec import parse_recorded
from paceline.data import DATASETS
from paceline.data.dataset import DatasetInfo
from paceline.measure.machine import cores_usable
from paceline.models import MODELS
from paceline.models.build import build_model
from paceline.study.folder import Cell

BATCH = 8
"""Of the step that is timed."""
STEPS = 2
EVALUATING = 1 / 3
"""Of a training step: the forward pass alone."""
IMPORT_LIMIT_SECONDS = 60.0


class DurationModel:
    """Of a study's cells; what several of them share is measured once."""

    def __init__(self) -> None:
        self._sample_seconds: dict[tuple[str, tuple[int, ...], int], float] = {}
        self._import_seconds: float | None = None

    def seconds_of(self, config: RunConfig) -> float | None:
        """None for models and data of a user's own, and where a GPU may train."""
        if config.data not in DATASETS or config.model not in MODELS:
            return None
        if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
            return None
        outline = getattr(DATASETS.load(config.data), "outline", None)
        if not isinstance(outline, DatasetInfo):
            return None
        sample_seconds = self._of_a_sample(config.model, outline) / speed(config, cores_usable())
        return samples_per_worker(config, outline) * sample_seconds + self._start(config)

    def _of_a_sample(self, model: str, outline: DatasetInfo) -> float:
        key = (model, outline.sample_shape, outline.classes)
        if key not in self._sample_seconds:
            self._sample_seconds[key] = time_a_sample(*key)
        return self._sample_seconds[key]

    def _start(self, config: RunConfig) -> float:
        """The command, then its workers and on emulated machines their launchers, by turns."""
        if self._import_seconds is None:
            self._import_seconds = time_an_import()
        processes = config.workers * (2 if config.cluster else 1)
        return self._import_seconds * (1 + processes / min(processes, cores_usable()))


def samples_per_worker(config: RunConfig, outline: DatasetInfo) -> float:
    """As many as each trains on; those that it only evaluates count for less."""
    train = config.train_samples or outline.train_samples
    test = config.test_samples or outline.test_samples
    per_epoch = max(1, math.ceil(train / config.global_batch_size))
    iterations = config.iterations_in_total(per_epoch)
    every = per_epoch if config.eval_every == "epoch" else config.eval_every
    evaluations = 1 if every == "never" else max(1, iterations // every)
    trained = iterations * min(config.global_batch_size, train)
    return (trained + EVALUATING * evaluations * test) / config.workers


def speed(config: RunConfig, cores: int) -> float:
    """Cores that a worker keeps busy, at most."""
    spec = parse_recorded(config.cluster) if config.cluster else None
    # Emulated machines share the cores of this one.
    on_machine = config.workers if spec else config.nproc_per_node
    share = cores / on_machine
    threads = min(config.threads or max(1.0, share), share)
    quota = spec.cpus_of(config.node_rank, cores) if spec else None
    return threads if quota is None else min(threads, quota / config.nproc_per_node)


def time_a_sample(model: str, sample_shape: tuple[int, ...], classes: int) -> float:
    """Seconds on one core, forward and backward; the better of a few steps after a first one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        network = build_model(model, sample_shape, classes, seed=0)
        inputs = torch.zeros(BATCH, *sample_shape)
        labels = torch.zeros(BATCH, dtype=torch.int64)
        best = math.inf
        for step in range(STEPS + 1):
            began = perf_counter()
            F.cross_entropy(network(inputs), labels).backward()
            if step:
                best = min(best, perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return best / BATCH


def time_an_import() -> float:
    """Seconds until a new process has torch, which is most of what starting a worker takes."""
    began = perf_counter()
    subprocess.run(
        [sys.executable, "-c", "import torch"], check=False, timeout=IMPORT_LIMIT_SECONDS
    )
    return perf_counter() - began


def seconds_of(cell: Cell, cells: Iterable[Cell]) -> float | None:
    """The mean of its finished repeats, else of its part's cells, else of all; None: unknown."""
    timed = [other for other in cells if other.elapsed_seconds is not None]
    nearer = (
        [other for other in timed if other.group == cell.group],
        [other for other in timed if other.part == cell.part],
        timed,
    )
    for others in nearer:
        if others:
            return fmean(other.elapsed_seconds or 0.0 for other in others)
    return None


def seconds_of_all(cells: Iterable[Cell], known: Iterable[Cell]) -> float | None:
    """What `cells` will take together; None where nothing is known about one of them."""
    known = list(known)
    each = [seconds_of(cell, known) for cell in cells]
    told = [seconds for seconds in each if seconds is not None]
    return sum(told) if len(told) == len(each) else None


def format_duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
