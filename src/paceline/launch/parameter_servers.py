"""Parameter servers: processes beside the workers, and how the two come together.

Among all processes of a run the workers have the first ranks and the servers the following ones;
only workers are counted as workers. They meet at the workers' store, and each worker gets a pair
with each server (strategies/parameter_server/protocol.py), and heartbeats beside it
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

from paceline.comm.communicator import Communicator, no_answer
from paceline.comm.rank_info import RankInfo
from paceline.comm.rendezvous import Rendezvous
from paceline.config import RunConfig, from_record
from paceline.errors import PeerError, RunError, error_line
from paceline.launch import environment
from paceline.launch.processes import LocalProcesses
from paceline.launch.signals import SIGNALS
from paceline.measure.traffic import Traffic
from paceline.records import SCHEMA, RunFolder, read_json, write_json
from paceline.strategies.options import create_strategy
from paceline.strategies.parameter_server.connection import Pair
from paceline.strategies.parameter_server.heartbeat import Address, Heartbeats
from paceline.strategies.parameter_server.protocol import SERVER, WORKER
from paceline.strategies.strategy import ServerStrategy
from paceline.training.device import computing
from paceline.training.optimizer import build_optimizer

LEAVING_SECONDS = 3.0
"""What servers get to notice that their workers have left."""


def server_ranks(config: RunConfig, node: int) -> list[int]:
    """The ranks of the servers that run on a node; none unless the strategy has servers."""
    nodes = _server_nodes(config, config.nnodes)
    return [config.workers + number for number, where in enumerate(nodes) if where == node]


def main(arguments: list[str]) -> int:
    """Run a parameter server: `CONFIG FOLDER ...`."""
    # Workers decide when a run ends, and then leave; the launcher kills a server that hangs.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    config = from_record(read_json(Path(arguments[0]))["config"])
    place = environment.detect()
    assert place is not None
    try:
        serve(config, place)
    except PeerError as error:
        if error.noticed_at:
            raise
        # Not secondary: what a server fails by, its workers cannot know.
        raise RunError(str(error)) from None
    return 0


def serve(config: RunConfig, place: RankInfo) -> None:
    """Meet the workers, and serve them until all have left."""
    with computing(config), _pairs_with_workers(config, place) as workers:
        strategy = create_strategy(config.strategy, config.options)
        assert isinstance(strategy, ServerStrategy)
        number = place.rank - place.world_size
        strategy.serve(number, workers, lambda weights: build_optimizer(config, [weights]))
        for rank, pair in enumerate(workers):
            if pair.silent_seconds is not None:
                cause = f"server {number}: rank {rank}: {no_answer(pair.silent_seconds)}"
                error = PeerError(cause)
                # The other workers fail because of it, later than it was noticed.
                error.noticed_at = pair.lost_at
                raise error


@contextmanager
def connect_servers(
    config: RunConfig, place: RankInfo, traffic: Traffic
) -> Iterator[Sequence[Communicator]]:
    """A worker's connections, counted in its traffic; none where the strategy has no servers."""
    count = _server_count(config, place)
    if not count:
        yield []
        return
    meeting = _meeting(config, place)
    store = meeting.join()
    with Heartbeats(config.timeout_seconds) as heartbeats, ExitStack() as stack:
        for number in range(count):
            _connect_heartbeats(heartbeats, store, number, config, place)
        heartbeats.start()
        names = [f"{number}/{place.rank}" for number in range(count)]
        yield _pairs(config, meeting, store, names, WORKER, traffic, heartbeats, stack)


@contextmanager
def _pairs_with_workers(config: RunConfig, place: RankInfo) -> Iterator[Sequence[Pair]]:
    number = place.rank - place.world_size
    meeting = _meeting(config, place)
    store = meeting.join()
    with Heartbeats(config.timeout_seconds) as heartbeats, ExitStack() as stack:
        address = heartbeats.listen(meeting.local_address())
        store.set(_heartbeat_key(number), address.encode())
        heartbeats.start()
        names = [f"{number}/{rank}" for rank in range(place.world_size)]
        yield _pairs(config, meeting, store, names, SERVER, Traffic(), heartbeats, stack)


def _server_count(config: RunConfig, place: RankInfo) -> int:
    return len(_server_nodes(config, place.nnodes))


def _server_nodes(config: RunConfig, nnodes: int) -> list[int]:
    strategy = create_strategy(config.strategy, config.options)
    return strategy.server_nodes(nnodes) if isinstance(strategy, ServerStrategy) else []


def _meeting(config: RunConfig, place: RankInfo) -> Rendezvous:
    return Rendezvous(
        place.rank,
        place.world_size + _server_count(config, place),
        place.master_addr,
        place.master_port,
        timeout_seconds=config.rendezvous_seconds,
        serves_store=False,
        noun="process",
        name=f"servers/{place.restart_count}",
    )


def _heartbeat_key(number: int) -> str:
    return f"heartbeats/{number}"


def _connect_heartbeats(
    heartbeats: Heartbeats, store: Store, number: int, config: RunConfig, place: RankInfo
) -> None:
    try:
        address = Address.decode(store.get(_heartbeat_key(number)).decode())
        heartbeats.connect(address, place.rank, number, config.rendezvous_seconds)
    except (OSError, DistError) as error:
        cause = error_line(error)
        raise PeerError(f"rank {place.rank}: server {number}: no heartbeats: {cause}") from None


def _pairs(
    config: RunConfig,
    meeting: Rendezvous,
    store: Store,
    names: Sequence[str],
    side: int,
    traffic: Traffic,
    heartbeats: Heartbeats,
    stack: ExitStack,
) -> list[Pair]:
    """One pair for each name, in the order of the peers' numbers."""
    pairs = []
    for number, name in enumerate(names):
        pair = Pair(
            PrefixStore(name, store),
            side,
            2,
            address=meeting.local_address(),
            timeout_seconds=config.rendezvous_seconds,
            traffic=traffic,
        )
        stack.enter_context(pair)
        heartbeats.when_lost(number, partial(pair.lose, config.timeout_seconds))
        pairs.append(pair)
    return pairs


@contextmanager
def local_parameter_servers(
    config: RunConfig, folder: RunFolder, place: RankInfo
) -> Iterator[None]:
    """Where workers were started by torchrun or srun: the first one of a node has its servers."""
    ranks = server_ranks(config, place.node_rank) if place.local_rank == 0 else []
    if not ranks:
        yield
        return
    launch_file = folder.launch_file(place.node_rank)
    write_json(launch_file, {"schema": SCHEMA, "config": config.to_dict()})
    with LocalProcesses(folder, place.world_size) as servers:
        try:
            for rank in ranks:
                rank_info = replace(place, rank=rank, local_rank=0)
                servers.start("server", rank_info, [str(launch_file), str(folder.path)])
            yield
        finally:
            servers.terminate(LEAVING_SECONDS)
            folder.remove_transient([launch_file, *map(servers.output_file, ranks)])
