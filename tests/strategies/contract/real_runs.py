"""Complete workers, from configuration to report, in the processes of the pool."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.rank_info import RankInfo
from paceline.comm.rendezvous import Rendezvous
from paceline.config import RunConfig, from_mapping
from paceline.launch.parameter_servers import connect_servers, serve, server_ranks
from paceline.measure.phase_clock import PhaseClock
from paceline.records import RunFolder
from paceline.strategies import create_strategy
from paceline.training.display import open_display
from paceline.training.rank_report import RankReport
from paceline.training.trainer import RankContext, prepare, run_worker
from tests.support.worker_pool import WorkerPool, free_port


@dataclass(frozen=True)
class Run:
    report: RankReport
    weights: dict[str, Tensor]
    """Includes buffers."""


def run(pool: WorkerPool, workers: int, folder: Path, **settings: Any) -> list[Run]:
    """Run and return the report and weights of each worker, by rank."""
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
    config = from_mapping(values)
    RunFolder.create(config)
    if workers == 1:
        return in_process.run(1, lambda communicator: work(communicator, values, 0))
    with servers_of(config) as port:
        return pool.run(workers, work, values, port, fresh=True)


@contextmanager
def servers_of(config: RunConfig) -> Iterator[int]:
    """Run the servers of the strategy in threads; yields the rendezvous port."""
    strategy = create_strategy(config.strategy, config.options)
    ranks, port = server_ranks(config, strategy, 0), free_port()
    if not ranks:
        yield port
        return
    store = Rendezvous(0, 1, "127.0.0.1", port, name="host").join()
    rank_info = rank_info_of(config.workers, config.workers, port)
    threads = [Thread(target=serve, args=(config, replace(rank_info, rank=rank))) for rank in ranks]
    for thread in threads:
        thread.start()
    try:
        yield port
    finally:
        for thread in threads:
            thread.join(30.0)
        del store


def rank_info_of(rank: int, workers: int, port: int) -> RankInfo:
    return RankInfo(rank, workers, rank, workers, 0, 1, "127.0.0.1", port, has_external_store=True)


def work(communicator: Communicator, values: dict[str, Any], port: int) -> Run:
    """Run one worker as the launcher does."""
    config = from_mapping(values)
    folder = RunFolder.open(Path(config.out) / str(config.name))
    rank = communicator.rank
    rank_info = rank_info_of(rank, communicator.world_size, port)
    with (
        warnings.catch_warnings(),
        connect_servers(
            config,
            create_strategy(config.strategy, config.options),
            rank_info,
            communicator.traffic,
        ) as servers,
    ):
        warnings.simplefilter("error")
        prepared = prepare(config)
        report = run_worker(
            config,
            folder,
            prepared,
            RankContext(rank_info, communicator, None, servers),
            None,
            open_display(quiet=True),
            PhaseClock(),
        )
    if report.status != "finished":
        raise RuntimeError(f"rank {rank}: {report.cause}")
    state = prepared.model.state_dict()
    return Run(report, {name: value.detach().clone() for name, value in state.items()})


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the relative distance between two states."""

    def flat(state: dict[str, Tensor]) -> Tensor:
        return torch.cat([value.double().flatten() for value in state.values()])

    return float((flat(one) - flat(other)).norm() / flat(other).norm())
