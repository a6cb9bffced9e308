"""Parameter servers: their processes, and their connections to the workers.

Servers have the ranks after those of the workers and do not count as workers. They join at the
workers' store. Each worker has a connection to each server
(strategies/parameter_server/protocol.py) and exchanges heartbeats with it
(strategies/parameter_server/heartbeat.py).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed import (  # type: ignore[attr-defined]  # torch lists only the first
    DistError,
    PrefixStore,
    Store,
)

from paceline.comm.communicator import Communicator, timeout_message
from paceline.comm.rank_info import RankInfo
from paceline.comm.rendezvous import Rendezvous
from paceline.config import RunConfig, from_record
from paceline.errors import PeerError, RunError, error_line
from paceline.launch import environment
from paceline.launch.processes import LocalProcesses
from paceline.launch.signals import SIGNALS
from paceline.measure.traffic import Traffic
from paceline.records import SCHEMA, RunFolder, read_json, write_json
from paceline.strategies import create_strategy
from paceline.strategies.parameter_server.connection import Pair
from paceline.strategies.parameter_server.heartbeat import Address, Heartbeats
from paceline.strategies.parameter_server.protocol import SERVER, WORKER
from paceline.strategies.strategy import ServerStrategy, Strategy
from paceline.training.device import computing
from paceline.training.optimizer import build_optimizer

LEAVING_SECONDS = 3.0
"""Time for servers to notice that their workers have left."""


def server_ranks(config: RunConfig, strategy: Strategy, node: int) -> list[int]:
    """Ranks of the servers on a node; none unless the strategy has servers."""
    nodes = _server_nodes(strategy, config.nnodes)
    return [config.workers + number for number, where in enumerate(nodes) if where == node]


def main(arguments: list[str]) -> int:
    """Run a parameter server: `CONFIG FOLDER ...`."""
    # Workers decide when a run ends, and then leave; the launcher kills a server that hangs.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    config = from_record(read_json(Path(arguments[0]))["config"])
    rank_info = environment.detect()
    assert rank_info is not None
    try:
        serve(config, rank_info)
    except PeerError as error:
        if error.noticed_at:
            raise
        # Not secondary: the workers do not know the cause.
        raise RunError(str(error)) from None
    return 0


def serve(config: RunConfig, rank_info: RankInfo) -> None:
    """Connect to the workers and serve them until all have left."""
    strategy = create_strategy(config.strategy, config.options)
    assert isinstance(strategy, ServerStrategy)
    count = len(strategy.server_nodes(rank_info.nnodes))
    with computing(config), _pairs_with_workers(config, rank_info, count) as workers:
        number = rank_info.rank - rank_info.world_size
        strategy.serve(number, workers, lambda weights: build_optimizer(config, [weights]))
        for rank, pair in enumerate(workers):
            if pair.silent_seconds is not None:
                cause = f"server {number}: rank {rank}: {timeout_message(pair.silent_seconds)}"
                error = PeerError(cause)
                # The other workers fail because of it, later than it was noticed.
                error.noticed_at = pair.lost_at
                raise error


@contextmanager
def connect_servers(
    config: RunConfig, strategy: Strategy, rank_info: RankInfo, traffic: Traffic
) -> Iterator[Sequence[Communicator]]:
    """A worker's connections to the servers, counted in its traffic; none without servers."""
    count = len(_server_nodes(strategy, rank_info.nnodes))
    if not count:
        yield []
        return
    rendezvous = _rendezvous(config, rank_info, count)
    store = rendezvous.join()
    with Heartbeats(config.timeout_seconds) as heartbeats, ExitStack() as stack:
        for number in range(count):
            _connect_heartbeats(heartbeats, store, number, config, rank_info)
        heartbeats.start()
        names = [f"{number}/{rank_info.rank}" for number in range(count)]
        yield _pairs(config, rendezvous, store, names, WORKER, traffic, heartbeats, stack)


@contextmanager
def _pairs_with_workers(
    config: RunConfig, rank_info: RankInfo, count: int
) -> Iterator[Sequence[Pair]]:
    number = rank_info.rank - rank_info.world_size
    rendezvous = _rendezvous(config, rank_info, count)
    store = rendezvous.join()
    with Heartbeats(config.timeout_seconds) as heartbeats, ExitStack() as stack:
        address = heartbeats.listen(rendezvous.local_address())
        store.set(_heartbeat_key(number), address.encode())
        heartbeats.start()
        names = [f"{number}/{rank}" for rank in range(rank_info.world_size)]
        yield _pairs(config, rendezvous, store, names, SERVER, Traffic(), heartbeats, stack)


def _server_nodes(strategy: Strategy, nnodes: int) -> list[int]:
    return strategy.server_nodes(nnodes) if isinstance(strategy, ServerStrategy) else []


def _rendezvous(config: RunConfig, rank_info: RankInfo, server_count: int) -> Rendezvous:
    # A single worker has no connections to other workers, for which it would serve a store.
    is_served = rank_info.has_external_store or rank_info.world_size > 1
    return Rendezvous(
        rank_info.rank,
        rank_info.world_size + server_count,
        rank_info.master_addr,
        rank_info.master_port,
        timeout_seconds=config.rendezvous_seconds,
        serves_store=False if is_served else None,
        noun="process",
        name=f"servers/{rank_info.restart_count}",
    )


def _heartbeat_key(number: int) -> str:
    return f"heartbeats/{number}"


def _connect_heartbeats(
    heartbeats: Heartbeats, store: Store, number: int, config: RunConfig, rank_info: RankInfo
) -> None:
    try:
        address = Address.decode(store.get(_heartbeat_key(number)).decode())
        heartbeats.connect(address, rank_info.rank, number, config.rendezvous_seconds)
    except (OSError, DistError) as error:
        cause = error_line(error)
        raise PeerError(f"rank {rank_info.rank}: server {number}: no heartbeats: {cause}") from None


def _pairs(
    config: RunConfig,
    rendezvous: Rendezvous,
    store: Store,
    names: Sequence[str],
    side: int,
    traffic: Traffic,
    heartbeats: Heartbeats,
    stack: ExitStack,
) -> list[Pair]:
    """A connection for each name, in the order of the peers' numbers."""
    pairs = []
    for number, name in enumerate(names):
        pair = Pair(
            PrefixStore(name, store),
            side,
            2,
            address=rendezvous.local_address(),
            timeout_seconds=config.rendezvous_seconds,
            traffic=traffic,
        )
        stack.enter_context(pair)
        heartbeats.when_lost(number, partial(pair.lose, config.timeout_seconds))
        pairs.append(pair)
    return pairs


@contextmanager
def local_parameter_servers(
    config: RunConfig, strategy: Strategy, folder: RunFolder, rank_info: RankInfo
) -> Iterator[None]:
    """Under torchrun or srun, run the node's servers as children of its first worker."""
    is_first = rank_info.local_rank == 0
    ranks = server_ranks(config, strategy, rank_info.node_rank) if is_first else []
    if not ranks:
        yield
        return
    launch_file = folder.launch_file(rank_info.node_rank)
    write_json(launch_file, {"schema": SCHEMA, "config": config.to_dict()})
    with LocalProcesses(folder, rank_info.world_size) as servers:
        try:
            for rank in ranks:
                own = replace(rank_info, rank=rank, local_rank=0)
                servers.start("server", own, [str(launch_file), str(folder.path)])
            yield
        finally:
            servers.terminate(LEAVING_SECONDS)
            folder.remove_transient([launch_file, *map(servers.output_file, ranks)])
