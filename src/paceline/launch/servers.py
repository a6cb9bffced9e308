"""Parameter servers: processes beside the workers, and how the two come together.

Among all processes of a run the workers have the first ranks and the servers the following ones;
only workers are counted as workers. They meet at the workers' store, and each worker gets a pair
with each server (sync/server/link.py).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not list it

from paceline.comm.communicator import Communicator
from paceline.comm.place import Place
from paceline.comm.rendezvous import Meeting
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.config import RunConfig, from_mapping
from paceline.launch import environment
from paceline.launch.ending import Ending, write_failure
from paceline.launch.spawn import spawn
from paceline.measure.traffic import Traffic
from paceline.records import SCHEMA, RunFolder, read_json, write_json
from paceline.sync.options import create_strategy
from paceline.sync.server.link import SERVER, WORKER
from paceline.worker.device import computing
from paceline.worker.optimiser import build_optimizer
from paceline.worker.report import explain

PATIENCE_SECONDS = 7 * 24 * 3600.0
"""How long a server waits for a worker's next request: workers may evaluate for long, and whoever
watches over the run ends its servers with it."""
LEAVING_SECONDS = 3.0
"""What servers get to notice that their workers have left."""


def server_ranks(config: RunConfig, node: int) -> list[int]:
    """The ranks of the servers that run on a node; none unless the strategy has servers."""
    nodes = create_strategy(config.strategy, config.options).server_nodes(config.nnodes)
    return [config.workers + number for number, where in enumerate(nodes) if where == node]


def main(arguments: list[str]) -> int:
    """The process of one server: `CONFIG FOLDER`, its place in the environment."""
    # Workers decide when a run ends, and then leave; the launcher has other means in an emergency.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    config = from_mapping(read_json(Path(arguments[0]))["config"])
    folder = RunFolder(Path(arguments[1]))
    place = environment.detect()
    assert place is not None
    try:
        serve(config, place)
    except Exception as error:  # noqa: BLE001 - told by the launcher
        status, cause, code = explain(error, folder)
        write_failure(folder, place.rank, Ending(cause, code, status, False, time.time()))
        return code
    return 0


def serve(config: RunConfig, place: Place) -> None:
    """Meet the workers, and serve them until all have left."""
    with computing(config), _pairs_with_workers(config, place) as workers:
        strategy = create_strategy(config.strategy, config.options)
        number = place.rank - place.world_size
        strategy.serve(number, workers, lambda weights: build_optimizer(config, [weights]))


@contextmanager
def pairs_with_servers(
    config: RunConfig, place: Place, traffic: Traffic
) -> Iterator[Sequence[Communicator]]:
    """A worker's connections, counted in its traffic; none where the strategy has no servers."""
    count = len(create_strategy(config.strategy, config.options).server_nodes(place.nnodes))
    names = [f"{number}/{place.rank}" for number in range(count)]
    with _pairs(config, place, names, WORKER, config.timeout_seconds, traffic) as pairs:
        yield pairs


@contextmanager
def _pairs_with_workers(config: RunConfig, place: Place) -> Iterator[Sequence[Communicator]]:
    number = place.rank - place.world_size
    names = [f"{number}/{rank}" for rank in range(place.world_size)]
    with _pairs(config, place, names, SERVER, PATIENCE_SECONDS, Traffic()) as pairs:
        yield pairs


@contextmanager
def _pairs(
    config: RunConfig,
    place: Place,
    names: Sequence[str],
    side: int,
    timeout_seconds: float,
    traffic: Traffic,
) -> Iterator[Sequence[Communicator]]:
    if not names:
        yield []
        return
    servers = len(create_strategy(config.strategy, config.options).server_nodes(place.nnodes))
    meeting = Meeting(
        place.rank,
        place.world_size + servers,
        place.master_addr,
        place.master_port,
        timeout_seconds=config.rendezvous_seconds,
        serves_store=False,
        noun="process",
        name=f"servers/{place.attempt}",
    )
    store, address = meeting.join(), meeting.local_address()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                TorchCommunicator(
                    PrefixStore(name, store),
                    side,
                    2,
                    address=address,
                    timeout_seconds=timeout_seconds,
                    traffic=traffic,
                )
            )
            for name in names
        ]


@contextmanager
def hosted(config: RunConfig, folder: RunFolder, place: Place) -> Iterator[None]:
    """Where workers were started by torchrun or srun: the first one of a node has its servers."""
    ranks = server_ranks(config, place.node) if place.local_rank == 0 else []
    if not ranks:
        yield
        return
    launch_file = folder.path / f"launch-{place.node}.json"
    write_json(launch_file, {"schema": SCHEMA, "config": config.to_dict()})
    processes: list[Popen[bytes]] = []
    try:
        for rank in ranks:
            own = replace(place, rank=rank, local_rank=0)
            output = folder.path / f"output-server-{rank - place.world_size}.txt"
            processes.append(spawn("server", own, [str(launch_file), str(folder.path)], output))
        yield
    finally:
        for process in processes:
            _await_end(process)
        launch_file.unlink(missing_ok=True)
        for output in folder.path.glob("output-server-*.txt"):
            if not output.stat().st_size:
                output.unlink()


def _await_end(process: Popen[bytes]) -> None:
    try:
        process.wait(LEAVING_SECONDS)
    except TimeoutExpired:
        process.kill()
        process.wait()
