"""Whole workers, from config to report, on the processes of the pool."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.place import Place
from paceline.config import from_mapping
from paceline.measure.clock import PhaseClock
from paceline.records import RunFolder
from paceline.worker.display import open_display
from paceline.worker.report import WorkerReport
from paceline.worker.run import Team, prepare, run_worker
from worker_pool import WorkerPool


@dataclass(frozen=True)
class Run:
    report: WorkerReport
    weights: dict[str, Tensor]
    """And buffers."""


def run(pool: WorkerPool, workers: int, folder: Path, **settings: Any) -> list[Run]:
    """What each worker of a run ended with, by rank."""
    values = {
        "threads": 1,
        "test_samples": 8,
        "sample_seconds": 0,
        "tensorboard": False,
        "eval_every": "never",
        **settings,
        "nproc_per_node": workers,
        "out": str(folder),
        "name": f"{settings.get('strategy', 'single')}-{workers}",
    }
    RunFolder.create(from_mapping(values))
    if workers == 1:
        return in_process.run(1, lambda communicator: work(communicator, values))
    return pool.run(workers, work, values, fresh=True)


def work(communicator: Communicator, values: dict[str, Any]) -> Run:
    """One worker, as the launcher runs it."""
    config = from_mapping(values)
    folder = RunFolder.open(Path(config.out) / str(config.name))
    rank, size = communicator.rank, communicator.world_size
    place = Place(rank, size, rank, size, 0, 1, "127.0.0.1", 0, store_is_served=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared = prepare(config)
        report = run_worker(
            config,
            folder,
            prepared,
            Team(place, communicator, None),
            None,
            open_display(quiet=True),
            PhaseClock(),
        )
    if report.status != "finished":
        raise RuntimeError(f"rank {rank}: {report.cause}")
    state = prepared.model.state_dict()
    return Run(report, {name: value.detach().clone() for name, value in state.items()})


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """How far two states are from one another, relative to their size."""

    def flat(state: dict[str, Tensor]) -> Tensor:
        return torch.cat([value.double().flatten() for value in state.values()])

    return float((flat(one) - flat(other)).norm() / flat(other).norm())
