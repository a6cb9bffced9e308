"""Parameter servers: their processes, and their connections to the workers.

Servers have the ranks after those of the workers and do not count as workers. They join at the
workers' store, where each publishes its address. Each worker has two connections to each server:
one for requests (strategies/parameter_server/protocol.py) and one for heartbeats
(strategies/parameter_server/heartbeat.py).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed import DistError

from paceline.comm.communicator import timeout_message
from paceline.comm.connection import Address, Connection, Listener
from paceline.comm.rank_info import RankInfo
from paceline.comm.rendezvous import Rendezvous
from paceline.config import RunConfig, from_record
from paceline.errors import PeerError, RunError, error_line
from paceline.formatting import format_ranks
from paceline.launch import environment
from paceline.launch.processes import LocalProcesses
from paceline.launch.signals import SIGNALS
from paceline.measure.traffic import Traffic
from paceline.records import SCHEMA, RunFolder, read_json, write_json
from paceline.strategies import create_strategy
from paceline.strategies.parameter_server.heartbeat import Heartbeats
from paceline.strategies.strategy import ServerStrategy, Strategy
from paceline.training.device import computing
from paceline.training.optimizer import build_optimizer

LEAVING_SECONDS = 3.0
"""Time for servers to notice that their workers have left."""

REQUESTS, HEARTBEATS = range(2)
"""Channels: the connections between a worker and a server."""


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
    nodes = strategy.server_nodes(rank_info.nnodes)
    with computing(config), _connect_workers(config, rank_info, len(nodes)) as workers:
        number = rank_info.rank - rank_info.world_size
        strategy.serve(number, workers, lambda weights: build_optimizer(config, [weights]))
        for rank, worker in enumerate(workers):
            if worker.silent_seconds is not None:
                cause = f"server {number}: rank {rank}: {timeout_message(worker.silent_seconds)}"
                error = PeerError(cause)
                # The other workers fail because of it, later than it was noticed.
                error.noticed_at = worker.lost_at
                raise error


@contextmanager
def connect_servers(
    config: RunConfig, strategy: Strategy, rank_info: RankInfo, traffic: Traffic
) -> Iterator[Sequence[Connection]]:
    """A worker's connections to the servers, counted in its traffic; none without servers."""
    nodes = _server_nodes(strategy, rank_info.nnodes)
    if not nodes:
        yield []
        return
    own_name = f"rank {rank_info.rank}"
    store = _rendezvous(config, rank_info, len(nodes)).join()
    with Heartbeats(config.timeout_seconds) as heartbeats, ExitStack() as stack:
        servers = []
        for number, node in enumerate(nodes):
            name = f"server {number}"
            try:
                address = Address.decode(store.get(_address_key(number)).decode())
                limit = config.rendezvous_seconds
                requests = address.connect(REQUESTS, rank_info.rank, limit)
                server = Connection(
                    requests,
                    own_name,
                    name,
                    is_same_node=node == rank_info.node_rank,
                    traffic=traffic,
                )
                stack.enter_context(server)
                heartbeats.add(address.connect(HEARTBEATS, rank_info.rank, limit), number)
            except (OSError, DistError) as error:
                cause = error_line(error)
                raise PeerError(f"{own_name}: {name}: cannot connect: {cause}") from None
            heartbeats.when_lost(number, partial(server.lose, config.timeout_seconds))
            servers.append(server)
        heartbeats.start()
        yield servers


@contextmanager
def _connect_workers(
    config: RunConfig, rank_info: RankInfo, server_count: int
) -> Iterator[Sequence[Connection]]:
    """A server's connections to all workers, by rank."""
    number = rank_info.rank - rank_info.world_size
    rendezvous = _rendezvous(config, rank_info, server_count)
    store = rendezvous.join()
    ranks = range(rank_info.world_size)
    with Heartbeats(config.timeout_seconds) as heartbeats, ExitStack() as stack:
        with Listener(rendezvous.local_address()) as listener:
            store.set(_address_key(number), listener.address.encode())
            expected = {(channel, rank) for channel in (REQUESTS, HEARTBEATS) for rank in ranks}
            sockets = listener.accept(expected, config.rendezvous_seconds)
        missing = [rank for rank in ranks if (HEARTBEATS, rank) not in sockets]
        workers = []
        for (channel, rank), each in sorted(sockets.items()):
            if channel == HEARTBEATS:
                heartbeats.add(each, rank)
                continue
            worker = stack.enter_context(Connection(each, f"server {number}", f"rank {rank}"))
            heartbeats.when_lost(rank, partial(worker.lose, config.timeout_seconds))
            workers.append(worker)
        if missing:
            raise PeerError(
                f"server {number}: {format_ranks(missing)} did not connect"
                f" within {config.rendezvous_seconds:g} s"
            )
        heartbeats.start()
        yield workers


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


def _address_key(number: int) -> str:
    return f"server/{number}"


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
