"""`overlap` compared with `ddp`, in one process per worker, on one host and on emulated nodes.

    python benchmarks/overlap.py [--on host,cluster] [--models lenet,mlp,resnet18,vgg11]
        [--batches 8,16,32,64] [--cluster nodes=2,cpus=0.5,bandwidth=1gbit] [--workers 2]
        [--seconds 12] [--pairs 6] [--link] [-o bucket_mib=4]

Needs an idle machine, and root for the emulated cluster. Each worker has one thread and holds both
strategies, which alternate in blocks of updates (ABBA). A block lasts from the start of the first
worker to the end of the last one: one update, or as many as take BLOCK_SECONDS, because shorter
blocks would pay for each other's CPU quota. The ratio is the median over pairs of adjacent blocks,
with a distribution-free interval of at least 95% (order statistics). A cell is `slower` or `faster`
if the interval excludes 1: of 32 equal cells, one or two do by chance.

`exposed` is the phase `exchange` and includes waiting for the other workers; `CPU` is the CPU time
of a worker. Both are means of rank 0 over all updates.

`--link` also measures the share of the link that `overlap` uses while it communicates: a bucket is
in flight from the moment the last worker submits it until the last worker has its sum, and a worker
sends 2 (P - 1) / P of the gradients in that time. The link bandwidth is measured by calibration.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from common.stats import min_max
from paceline.comm.communicator import Communicator
from paceline.comm.objects import all_gather_scalars
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.torch_distributed import connect
from paceline.config.cluster_spec import parse
from paceline.emulation import calibration
from paceline.emulation.cluster import EmulatedCluster
from paceline.measure.machine import hardware, software
from paceline.measure.phase_clock import PhaseClock
from paceline.measure.traffic import CountedTransfer
from paceline.models.build import build_model
from paceline.strategies import create_strategy
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy
from paceline.training.process import keep_freed_memory

MODELS, SHAPE, CLASSES = ("lenet", "mlp", "resnet18", "vgg11"), (3, 32, 32), 10
STRATEGIES = ("overlap", "ddp")
FIRST_UPDATES = 8
"""Not measured: the bucket sizes settle in these."""
BLOCK_SECONDS = 0.1
MOST_PAIRS = 60
LINK_UPDATES = 6
PORT = 29_511
PATIENCE_SECONDS = 30
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Job:
    """The settings of the workers."""

    world_size: int
    address: str
    is_one_host: bool
    cells: list[tuple[str, int]]
    """Model and batch per worker."""
    seconds: float
    pairs: int
    link: bool
    options: dict[str, str]


@dataclass
class Measured:
    """One strategy in one cell, as measured by one worker."""

    blocks: list[tuple[float, float]]
    """Begin and end of each block; all workers share one clock."""
    updates_per_block: int
    exposed_seconds: float
    hidden_seconds: float
    cpu_seconds: float
    """Per update, as the two above."""
    buckets: list[list[tuple[float, float, int]]]
    """With `--link`, per update and bucket: submission, completion, bytes sent by the formula."""
    layout: dict[str, Any]
    """What the strategy says about its buckets."""


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        work(int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--on", default="host,cluster")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="8,16,32,64", help="per worker")
    parser.add_argument("--cluster", default="nodes=2,cpus=0.5,bandwidth=1gbit")
    parser.add_argument("--workers", type=int, default=2, help="on one host")
    parser.add_argument("--seconds", type=float, default=12, help="of measurement per cell")
    parser.add_argument("--pairs", type=int, default=6, help="at least, per cell")
    parser.add_argument("--link", action="store_true", help="measure the share of the link")
    parser.add_argument("-o", action="append", default=[], help="key=value: an option of overlap")
    options = parser.parse_args()
    machine = hardware()
    print(f"{machine['cpu']}, {machine['cores']} cores, torch {software()['torch']}")
    batches = [int(batch) for batch in options.batches.split(",")]
    cells = [*product(options.models.split(","), batches)]
    strategy_options = dict(option.split("=", 1) for option in options.o)
    for place in options.on.split(","):
        spec = parse(options.cluster)
        with (
            EmulatedCluster.up(spec, calibrate=False) if place == "cluster" else nullcontext()
        ) as cluster:
            job = Job(
                spec.nodes if cluster else options.workers,
                cluster.addresses[0] if cluster else "127.0.0.1",
                cluster is None,
                cells,
                options.seconds,
                options.pairs,
                options.link,
                strategy_options,
            )
            print(f"\n{options.cluster if cluster else f'one host, {job.world_size} workers'}")
            rates = link_rates(cluster) if cluster and options.link else []
            print_header()
            for (model, batch), seen in zip(cells, run(cluster, job), strict=True):
                print_cell(model, batch, seen)
                if rates:
                    print_link(statistics.mean(rates), seen)


def link_rates(cluster: EmulatedCluster) -> list[float]:
    """TCP bits per second of every node, outgoing and incoming."""
    return [each.got for each in calibration.link_rates(cluster.state)]


def run(cluster: EmulatedCluster | None, job: Job) -> Iterator[dict[str, list[Measured]]]:
    """Yield each cell: for each strategy, the measurements of all workers."""
    processes = []
    try:
        for rank in range(job.world_size):
            words = [sys.executable, __file__, "worker", str(rank), json.dumps(asdict(job))]
            command = cluster.command(rank, words) if cluster else words
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for _ in job.cells:
            replies = []
            for process in processes:
                assert process.stdout is not None
                if not (line := process.stdout.readline()):
                    raise SystemExit("a worker failed")
                replies.append(json.loads(line))
            yield {name: [Measured(**each[name]) for each in replies] for name in STRATEGIES}
        for process in processes:
            process.wait(PATIENCE_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def print_header() -> None:
    print(
        f"{'':9}{'batch':>6}{'ms per update':^18}{'overlap to ddp':^25}"
        f"{'CPU ms':^15}{'exposed ms':^15}  buckets"
    )
    print(
        f"{'model':9}{'/wkr':>6}{'overlap':>9}{'ddp':>9}{'ratio':>7}{'interval':>13}{'n':>5}"
        f"{'overlap':>9}{'ddp':>6}{'overlap':>9}{'ddp':>6}",
        flush=True,
    )


def print_cell(model: str, batch: int, seen: dict[str, list[Measured]]) -> None:
    own, other = (block_seconds(seen[name]) for name in STRATEGIES)
    ratios = [first / second for first, second in zip(own, other, strict=True)]
    low, high = median_interval(ratios)
    verdict = "slower" if low > 1 else "faster" if high < 1 else ""
    first, second = (seen[name][0] for name in STRATEGIES)
    print(
        f"{model:9}{batch:>6}{ms(statistics.median(own)):>9}{ms(statistics.median(other)):>9}"
        f"{statistics.median(ratios):>7.3f}{f'{low:.3f}-{high:.3f}':>13}{len(ratios):>5}"
        f"{ms(first.cpu_seconds):>9}{ms(second.cpu_seconds):>6}"
        f"{ms(first.exposed_seconds):>9}{ms(second.exposed_seconds):>6}"
        f"  {describe(first.layout)} {verdict}",
        flush=True,
    )


def describe(layout: dict[str, Any]) -> str:
    return f"{layout['count']} ({layout['reason']})" if layout else ""


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds < 0.01 else f"{1e3 * seconds:.0f}"


def block_seconds(workers: Sequence[Measured]) -> list[float]:
    """Seconds per update in each block, from the first worker's start to the last one's end."""
    blocks = zip(*(each.blocks for each in workers), strict=True)
    return [
        (max(end for _, end in block) - min(begin for begin, _ in block))
        / workers[0].updates_per_block
        for block in blocks
    ]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The order statistics that contain the median with at least CONFIDENCE, if n >= 6."""
    ordered, count = sorted(values), len(values)
    outside = 0.0
    for cut in range(count // 2):
        outside += 2 * math.comb(count, cut) / 2**count
        if outside > 1 - CONFIDENCE:
            return ordered[max(0, cut - 1)], ordered[count - max(1, cut)]
    return ordered[0], ordered[-1]


def print_link(link: float, seen: dict[str, list[Measured]]) -> None:
    for name, workers in seen.items():
        updates = [*zip(*(each.buckets for each in workers), strict=True)]
        busy = [communicating_seconds(update) for update in updates]
        sent = [8 * sum(size for _, _, size in update[0]) for update in updates]
        shares = [bits / time / link for bits, time in zip(sent, busy, strict=True)]
        print(
            f"  {name}: {min_max(busy, '.3f')} s communicating, {min_max(shares, '.3f')} of"
            f" {link / 1e6:.0f} Mbit/s, {len(updates)} updates"
        )


def communicating_seconds(update: Sequence[Sequence[tuple[float, float, int]]]) -> float:
    total, until = 0.0, -math.inf
    for same in zip(*update, strict=True):
        begin = max(submitted for submitted, _, _ in same)
        end = max(completed for _, completed, _ in same)
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def work(rank: int, job: Job) -> None:
    """Run one worker, which prints one line per cell."""
    keep_freed_memory()
    torch.set_num_threads(1)
    with connect(Rendezvous(rank, job.world_size, job.address, PORT)) as communicator:
        for model, batch in job.cells:
            measured = measure(communicator, job, model, batch)
            print(json.dumps({name: asdict(each) for name, each in measured.items()}), flush=True)
        communicator.barrier().wait()


def measure(communicator: Communicator, job: Job, model: str, batch: int) -> dict[str, Measured]:
    generator = torch.Generator().manual_seed(communicator.rank)
    inputs = torch.randn(batch, *SHAPE, generator=generator)
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    strategies = {name: attach(communicator, name, job, model) for name in STRATEGIES}
    measured = {}
    for name, strategy in strategies.items():
        for _ in range(FIRST_UPDATES - 1):
            update(strategy, inputs, labels)
        communicator.barrier().wait()
        began = perf_counter()
        update(strategy, inputs, labels)
        own = torch.tensor(perf_counter() - began, dtype=torch.float64)
        seconds = float(all_gather_scalars(communicator, own).max())
        forget(strategy)
        measured[name] = Measured([], max(1, round(BLOCK_SECONDS / seconds)), 0, 0, 0, [], {})
    # Both in one unit, so that a pair of blocks has the same number of updates.
    updates = max(each.updates_per_block for each in measured.values())
    pairs = min(MOST_PAIRS, max(job.pairs, int(job.seconds / (2 * updates * seconds))))
    for number in range(pairs):
        # The strategies alternate in going first.
        for name in STRATEGIES if number % 2 == 0 else STRATEGIES[::-1]:
            communicator.barrier().wait()
            began, used = perf_counter(), process_time()
            for _ in range(updates):
                update(strategies[name], inputs, labels)
            measured[name].blocks.append((began, perf_counter()))
            measured[name].cpu_seconds += (process_time() - used) / (pairs * updates)
    for name, strategy in strategies.items():
        each = measured[name]
        each.updates_per_block = updates
        if strategy.meter is not None:
            strategy.meter.settle()
            each.layout = strategy.meter.summary().get("buckets", {})
        each.exposed_seconds = strategy.replica.clock.seconds["exchange"] / (pairs * updates)
        each.hidden_seconds = strategy.replica.hidden_exchange_seconds / (pairs * updates)
        if job.link:
            each.buckets = [buckets_of(strategy, inputs, labels) for _ in range(LINK_UPDATES)]
        strategy.finish()
    return measured


def buckets_of(
    strategy: Strategy, inputs: Tensor, labels: Tensor
) -> list[tuple[float, float, int]]:
    """Run an update and return its buckets."""
    communicator = strategy.replica.communicator
    communicator.barrier().wait()
    log: list[CountedTransfer] = []
    communicator.traffic.log = log
    update(strategy, inputs, labels)
    communicator.traffic.log = None
    return [(each.began, each.completed or math.nan, each.bytes_sent) for each in log]


def attach(communicator: Communicator, name: str, job: Job, model_name: str) -> Strategy:
    model = build_model(model_name, SHAPE, CLASSES, seed=0)
    replica = Replica(
        model=model,
        optimizer=SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True),
        clock=PhaseClock(),
        forward=model,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        communicator=communicator,
        node=0 if job.is_one_host else communicator.rank,
    )
    replica.batch_fraction = 1 / communicator.world_size
    strategy = create_strategy(name, job.options if name == "overlap" else {})
    strategy.setup(replica)
    return strategy


def forget(strategy: Strategy) -> None:
    """Reset the measurements."""
    replica = strategy.replica
    if strategy.meter is not None:
        strategy.meter.settle()
    replica.clock.enter("other")
    replica.clock.seconds.update(dict.fromkeys(replica.clock.seconds, 0.0))
    replica.hidden_exchange_seconds = 0.0


def update(strategy: Strategy, inputs: Tensor, labels: Tensor) -> None:
    replica = strategy.replica
    replica.clock.enter("forward")
    loss = F.cross_entropy(replica.forward(inputs), labels)
    replica.clock.enter("backward")
    strategy.backward(loss * replica.batch_fraction)
    strategy.step()
    replica.clock.enter("other")


if __name__ == "__main__":
    main()
