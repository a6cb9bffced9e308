"""Update time, phases and traffic of every strategy.

    python benchmarks/strategies.py [--quick] [--models lenet,mlp] [--workers 2,4]
                                    [--strategies overlap,ddp] [--batch-per-worker 8]

Worker processes start once, with one thread each. For each model and world size, all strategies are
set up side by side and alternate in short blocks of updates, so that background load affects all of
them equally. Compare within a table, by the ratios to `ddp` of adjacent blocks. Times are rank 0's:
median and quartiles over the blocks; phases and bytes are means over the same updates.

The parameter servers, one for each mode, are threads of one more process. In `async` and `bounded`
mode an update belongs to one worker and its own samples instead of to all workers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from threading import Thread
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not list it
from torch.nn import functional as F
from torch.optim import SGD

from paceline.comm.communicator import Communicator
from paceline.comm.connection import Address, Connection, Listener
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.torch_distributed import connect
from paceline.measure.machine import hardware, software
from paceline.measure.phase_clock import PhaseClock
from paceline.models.build import build_model
from paceline.strategies import STRATEGIES, create_strategy
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import AssignmentRequest, ServerStrategy, Strategy
from paceline.training.coordination import ClockOffset, attribute_waits, measure_clock_offset

SHAPE, CLASSES = (3, 32, 32), 10
MODELS = ("lenet", "mlp", "resnet18", "vgg11")
REFERENCE = "ddp"
SECONDS_PER_BLOCK = 0.5
FIRST_UPDATES = 8
CONNECT_SECONDS = 60.0
MODES = {f"server/{mode}": mode for mode in ("sync", "async", "bounded")}
"""Modes of the parameter server, by their names in the table."""
WITHOUT_END = AssignmentRequest(first=0, total=2**31, checkpoint_every=0, stop=False)


@dataclass(frozen=True)
class Cell:
    """What one table measures on each worker."""

    model: str
    strategies: tuple[str, ...]
    batch_per_worker: int
    rounds: int


@dataclass
class Measured:
    block_seconds: list[float]
    """The median update time of each block."""
    phases: dict[str, float]
    hidden_seconds: float
    bytes_sent: float
    updates: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small models and few rounds")
    parser.add_argument("--models", type=comma_separated)
    parser.add_argument("--workers", type=comma_separated, default=["2", "4"])
    parser.add_argument("--strategies", type=comma_separated)
    parser.add_argument("--batch-per-worker", type=int, default=8)
    options = parser.parse_args()
    models = options.models or (MODELS[:2] if options.quick else MODELS)
    rounds = 3 if options.quick else 9
    worlds = [int(text) for text in options.workers]
    print(f"{hardware()['cpu']}, {os.cpu_count()} cores, torch {software()['torch']}")
    print(f"batch of {options.batch_per_worker} per worker, {rounds} blocks per strategy")
    with workers(max(worlds) + 1, serve) as [server, *pipes]:
        for world in worlds:
            names = chosen(options.strategies, world)
            cells = [Cell(name, names, options.batch_per_worker, rounds) for name in models]
            for cell, measured in zip(cells, run(server, pipes[:world], cells), strict=True):
                show(cell, world, measured)


def comma_separated(text: str) -> list[str]:
    return text.split(",")


def chosen(asked: list[str] | None, world: int) -> tuple[str, ...]:
    """The selected strategies, by default all; the parameter server in each of its modes."""
    names: list[str] = []
    for name in asked or STRATEGIES.names():
        most = STRATEGIES.load(name).max_world_size
        if asked or most is None or most >= world:
            names += MODES if name == "parameter_server" else [name]
    return tuple(names)


def create(name: str) -> Strategy:
    if name in MODES:
        return create_strategy("parameter_server", {"mode": MODES[name]})
    return create_strategy(name, {})


def show(cell: Cell, world: int, measured: dict[str, Measured]) -> None:
    print(f"\n{cell.model}, {world} workers")
    print(f"{'':17}{'ms per update':^21}{'to':>6}{'ms, mean of':^29}{'MB':>7}")
    print(
        f"{'strategy':17}{'median':>8}{'quartiles':>13}{REFERENCE:>6}"
        f"{'compute':>8}{'exch.':>7}{'wait':>7}{'hidden':>7}{'sent':>7}"
    )
    for name, each in measured.items():
        low, median, high = statistics.quantiles(each.block_seconds, n=4)
        ratio = "" if REFERENCE not in measured else f"{ratio_to(each, measured[REFERENCE]):.2f}"
        phases = {phase: 1e3 * spent / each.updates for phase, spent in each.phases.items()}
        print(
            f"{name:17}{short(median):>8}{f'{short(low)}-{short(high)}':>13}{ratio:>6}"
            f"{phases['forward'] + phases['backward']:>8.1f}{phases['exchange']:>7.1f}"
            f"{phases['wait']:>7.1f}{1e3 * each.hidden_seconds / each.updates:>7.1f}"
            f"{each.bytes_sent / each.updates / 1e6:>7.2f}"
        )


def short(seconds: float) -> str:
    """Milliseconds in at most five characters, up to a hundred seconds."""
    return f"{1e3 * seconds:.1f}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def ratio_to(each: Measured, reference: Measured) -> float:
    """The median over rounds: the blocks of a round run within a few seconds of each other."""
    pairs = zip(each.block_seconds, reference.block_seconds, strict=True)
    return statistics.median(own / other for own, other in pairs)


@contextmanager
def workers(count: int, main: Callable[[Pipe], None]) -> Iterator[list[Pipe]]:
    """Processes that execute what they are sent until their pipes close."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=main, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(5.0)
            process.kill()


def run(
    server: Pipe, pipes: Sequence[Pipe], cells: Sequence[Cell]
) -> Iterator[dict[str, Measured]]:
    """Connect the workers and return what rank 0 measured in each cell."""
    port = free_port()
    for rank, pipe in enumerate((*pipes, server)):
        pipe.send((rank, len(pipes), port, cells))
    for _ in cells:
        first, *_ = [pipe.recv() for pipe in pipes]
        yield first
    server.recv()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(pipe: Pipe) -> None:
    """The main function of each process: the last rank runs the servers, the others work."""
    torch.set_num_threads(1)
    while True:
        try:
            rank, world, port, cells = pipe.recv()
        except EOFError:
            return
        all_processes = Rendezvous(rank, world + 1, "127.0.0.1", port, name="all_processes").join()
        if rank == world:
            for cell in cells:
                host_servers(all_processes, world, cell)
            pipe.send(None)
            continue
        own = Rendezvous(rank, world, "127.0.0.1", port, serves_store=False, name="workers")
        with connect(own) as communicator:
            for cell in cells:
                with servers_of(all_processes, communicator, cell) as servers:
                    pipe.send(measure(communicator, cell, servers))
            communicator.barrier().wait()


def host_servers(store: Store, world: int, cell: Cell) -> None:
    """Serve until the workers of a cell have disconnected."""
    threads = []
    for name in filter(MODES.__contains__, cell.strategies):
        with Listener("127.0.0.1") as listener:
            store.set(f"{cell.model}/{name}", listener.address.encode())
            sockets = listener.accept({(0, rank) for rank in range(world)}, CONNECT_SECONDS)
        ends = [Connection(sockets[0, rank], name, f"rank {rank}") for rank in range(world)]
        strategy = create(name)
        assert isinstance(strategy, ServerStrategy)
        arguments = (0, ends, lambda weight: optimizer_of([weight]))
        threads.append(Thread(target=strategy.serve, args=arguments))
        threads[-1].start()
    for thread in threads:
        thread.join()


@contextmanager
def servers_of(
    store: Store, communicator: Communicator, cell: Cell
) -> Iterator[dict[str, Connection]]:
    """This worker's connections to the servers, counted as its own traffic."""
    rank, traffic = communicator.rank, communicator.traffic
    servers = {}
    with ExitStack() as stack:
        for name in filter(MODES.__contains__, cell.strategies):
            address = Address.decode(store.get(f"{cell.model}/{name}").decode())
            servers[name] = Connection(
                address.connect(0, rank, CONNECT_SECONDS),
                f"rank {rank}",
                name,
                is_same_node=True,
                traffic=traffic,
            )
            stack.enter_context(servers[name])
        yield servers


def measure(
    communicator: Communicator, cell: Cell, servers: Mapping[str, Connection]
) -> dict[str, Measured]:
    generator = torch.Generator().manual_seed(communicator.rank)
    inputs = torch.randn(cell.batch_per_worker, *SHAPE, generator=generator)
    labels = torch.randint(CLASSES, (cell.batch_per_worker,), generator=generator)
    strategies = {
        name: attach(
            communicator, create(name), cell.model, [servers[name]] if name in servers else []
        )
        for name in cell.strategies
    }
    offset = ClockOffset(measure_clock_offset(communicator))
    updates = {}
    for name, strategy in strategies.items():
        # Bucket sizes settle in the first updates; then all ranks agree on the updates per block.
        seconds = block(strategy, inputs, labels, FIRST_UPDATES)[-1]
        agreed = torch.tensor([seconds], dtype=torch.float64)
        communicator.all_reduce(agreed, "control").wait()
        updates[name] = max(2, round(SECONDS_PER_BLOCK * communicator.world_size / float(agreed)))
        forget(strategy)
    results = {name: Measured([], {}, 0.0, 0.0, 0) for name in cell.strategies}
    for number in range(cell.rounds):
        turn = number % len(cell.strategies)
        for name in cell.strategies[turn:] + cell.strategies[:turn]:
            communicator.barrier().wait()
            sent = communicator.traffic.counts["gradients"].bytes_sent
            sent += communicator.traffic.counts["parameters"].bytes_sent
            seconds_of = block(strategies[name], inputs, labels, updates[name])
            results[name].block_seconds.append(statistics.median(seconds_of))
            results[name].updates += len(seconds_of)
            results[name].bytes_sent += (
                communicator.traffic.counts["gradients"].bytes_sent
                + communicator.traffic.counts["parameters"].bytes_sent
                - sent
            )
    for name, strategy in strategies.items():
        replica = strategy.replica
        attribute_waits(communicator, replica.clock, replica.exposed, offset)
        results[name].phases = dict(replica.clock.seconds)
        results[name].hidden_seconds = replica.hidden_exchange_seconds
        strategy.finish()
    return results


def optimizer_of(weights: Iterable[nn.Parameter]) -> SGD:
    return SGD(weights, lr=1e-4, momentum=0.9, fused=True)


def attach(
    communicator: Communicator,
    strategy: Strategy,
    model_name: str,
    servers: Sequence[Connection] = (),
) -> Strategy:
    model = build_model(model_name, SHAPE, CLASSES, seed=0)
    replica = Replica(
        model=model,
        optimizer=optimizer_of(model.parameters()),
        clock=PhaseClock(),
        forward=model,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        communicator=communicator,
        servers=servers,
    )
    replica.batch_fraction = 1 / communicator.world_size
    strategy.setup(replica)
    return strategy


def forget(strategy: Strategy) -> None:
    """Reset the measurements."""
    replica = strategy.replica
    replica.clock.enter("other")
    replica.clock.seconds.update(dict.fromkeys(replica.clock.seconds, 0.0))
    replica.exposed.clear()
    replica.hidden_exchange_seconds = 0.0


def block(strategy: Strategy, inputs: Tensor, labels: Tensor, count: int) -> list[float]:
    """Run updates and return the seconds of each on this rank."""
    seconds = [update(strategy, inputs, labels) for _ in range(count)]
    if strategy.meter is not None:
        # Other workers may wait for an update that this one has not pushed yet.
        strategy.meter.settle()
    return seconds


def update(strategy: Strategy, inputs: Tensor, labels: Tensor) -> float:
    """Run one update and return its seconds on this rank."""
    replica = strategy.replica
    replica.clock.enter("other")
    began = perf_counter()
    if isinstance(strategy, ServerStrategy) and not strategy.synchronous:
        strategy.next_assignment(WITHOUT_END)
    replica.clock.enter("forward")
    loss = F.cross_entropy(replica.forward(inputs), labels)
    replica.clock.enter("backward")
    strategy.backward(loss * replica.batch_fraction)
    strategy.step()
    replica.clock.enter("other")
    return perf_counter() - began


if __name__ == "__main__":
    main()
