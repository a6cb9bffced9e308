"""Link utilization of `overlap` while it communicates, and its speed relative to DDP.

    python benchmarks/overlap_link.py [--cluster nodes=4,cpus=0.5,bandwidth=1gbit] [--rounds 6]
                                      [--updates 3] [--batch-per-worker 16] [-o bucket_mib=4]

Needs root and an idle machine. Each node of an emulated cluster runs one worker that trains
`vgg11`; `overlap` and `ddp` are set up side by side and alternate in blocks of updates. All nodes
share one clock. For every update:

- A bucket is in flight from the moment the last worker submits it until the last worker has its
  sum. Communication is in flight while at least one bucket is.
- The rate is what one worker sends over its link in one direction in that time: 2 (P - 1) / P of
  the gradients by formula, or the count of its node's interface, which includes acknowledgements
  and some headers.
- An update lasts from the start of the first worker to the end of the last one. It cannot be
  shorter than its CPU time divided by the node's CPU quota.

The link bandwidth is measured by calibration before and after, as the mean over all nodes and both
directions. Figures are medians (min-max); the ratio compares the medians of adjacent blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter, process_time

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from common.stats import min_max
from paceline.comm.communicator import Communicator
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.torch_distributed import connect
from paceline.config.cluster_spec import parse
from paceline.emulation import calibration
from paceline.emulation.cluster import EmulatedCluster
from paceline.measure.machine import hardware, software
from paceline.measure.phase_clock import PhaseClock
from paceline.measure.procfs import NetworkCounter
from paceline.models.build import build_model
from paceline.strategies import create_strategy
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy
from paceline.training.process import keep_freed_memory

MODEL, SHAPE, CLASSES = "vgg11", (3, 32, 32), 10
STRATEGIES = ("overlap", "ddp")
FIRST_UPDATES = 3
"""Not measured: the bucket sizes settle in these."""
PORT = 29_511
PATIENCE_SECONDS = 900.0


@dataclass(frozen=True)
class Job:
    """The settings of the workers."""

    world_size: int
    address: str
    rounds: int
    updates: int
    batch_per_worker: int
    options: dict[str, str]


@dataclass(frozen=True)
class Update:
    """One update as measured by one worker."""

    began: float
    ended: float
    buckets: list[tuple[float, float, int]]
    """Per bucket: time of submission, time of completion, bytes sent by the formula."""
    interface_bytes: int
    cpu_seconds: float


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        work(int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", default="nodes=4,cpus=0.5,bandwidth=1gbit")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--updates", type=int, default=3, help="of a strategy in a round")
    parser.add_argument("--batch-per-worker", type=int, default=16)
    parser.add_argument("-o", action="append", default=[], help="key=value: an option of overlap")
    options = parser.parse_args()
    machine = hardware()
    print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['kernel']}, torch"
        f" {software()['torch']}; {MODEL}, {options.cluster}, batch of {options.batch_per_worker}"
        f" per worker, {options.rounds} rounds of {options.updates} updates"
    )
    with EmulatedCluster.up(parse(options.cluster), calibrate=False) as cluster:
        job = Job(
            cluster.spec.nodes,
            cluster.addresses[0],
            options.rounds,
            options.updates,
            options.batch_per_worker,
            dict(option.split("=", 1) for option in options.o),
        )
        rates = link_rates(cluster)
        seen = run(cluster, job)
        rates += link_rates(cluster)
    show(job, statistics.mean(rates), rates, seen)


def link_rates(cluster: EmulatedCluster) -> list[float]:
    """TCP bits per second of every node, outgoing and incoming."""
    return [each.got for each in calibration.link_rates(cluster.state)]


def run(cluster: EmulatedCluster, job: Job) -> dict[str, list[list[Update]]]:
    """For each strategy, its updates in order, each with the measurements of all workers."""
    processes = []
    try:
        for rank in range(job.world_size):
            words = [sys.executable, __file__, "worker", str(rank), json.dumps(asdict(job))]
            processes.append(
                subprocess.Popen(cluster.command(rank, words), stdout=subprocess.PIPE, text=True)
            )
        told = [json.loads(one.communicate(timeout=PATIENCE_SECONDS)[0]) for one in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {
        name: [
            [Update(**one) for one in same] for same in zip(*(t[name] for t in told), strict=True)
        ]
        for name in STRATEGIES
    }


def show(job: Job, link: float, rates: list[float], seen: dict[str, list[list[Update]]]) -> None:
    print(f"link {link / 1e6:.0f} Mbit/s ({min(rates) / 1e6:.0f} to {max(rates) / 1e6:.0f})")
    for name, updates in seen.items():
        busy = [communicating_seconds(one) for one in updates]
        sent = [8 * sum(size for _, _, size in one[0].buckets) for one in updates]
        counted = [8 * statistics.mean(each.interface_bytes for each in one) for one in updates]
        shares = [bits / time / link for bits, time in zip(sent, busy, strict=True)]
        on_wire = [bits / time / link for bits, time in zip(counted, busy, strict=True)]
        cpu = [each.cpu_seconds for one in updates for each in one]
        print(f"{name}, {len(updates)} updates of {len(updates[0][0].buckets)} buckets")
        print(f"  seconds per update           {min_max([lasted(one) for one in updates], '.3f')}")
        print(f"  CPU seconds of a worker      {min_max(cpu, '.3f')}")
        print(f"  seconds communicating        {min_max(busy, '.3f')}")
        print(f"  share of the link            {min_max(shares, '.3f')}")
        print(f"  share by the interface       {min_max(on_wire, '.3f')}")
    own, other = (blocks(seen[name], job.updates) for name in STRATEGIES)
    ratios = [second / first for first, second in zip(own, other, strict=True)]
    print(f"ddp / overlap, {len(ratios)} pairs of blocks: {min_max(ratios, '.3f')}")


def blocks(updates: list[list[Update]], size: int) -> list[float]:
    """The median update time of every block."""
    return [
        statistics.median(map(lasted, updates[begin : begin + size]))
        for begin in range(0, len(updates), size)
    ]


def lasted(update: Sequence[Update]) -> float:
    return max(each.ended for each in update) - min(each.began for each in update)


def communicating_seconds(update: Sequence[Update]) -> float:
    total, until = 0.0, float("-inf")
    for same in zip(*(each.buckets for each in update), strict=True):
        begin = max(handed_over for handed_over, _, _ in same)
        end = max(there for _, there, _ in same)
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def work(rank: int, job: Job) -> None:
    """Run one worker, which prints its updates."""
    keep_freed_memory()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(job.batch_per_worker, *SHAPE, generator=generator)
    labels = torch.randint(CLASSES, (job.batch_per_worker,), generator=generator)
    seen: dict[str, list[Update]] = {name: [] for name in STRATEGIES}
    with connect(Rendezvous(rank, job.world_size, job.address, PORT)) as communicator:
        strategies = {name: attach(communicator, name, job) for name in STRATEGIES}
        for strategy in strategies.values():
            for _ in range(FIRST_UPDATES):
                update(strategy, inputs, labels)
        for number in range(job.rounds):
            # The strategies alternate in going first.
            for name in STRATEGIES if number % 2 == 0 else STRATEGIES[::-1]:
                for _ in range(job.updates):
                    seen[name].append(update(strategies[name], inputs, labels))
        for strategy in strategies.values():
            strategy.finish()
        communicator.barrier().wait()
    print(json.dumps({name: [asdict(one) for one in updates] for name, updates in seen.items()}))


def attach(communicator: Communicator, name: str, job: Job) -> Strategy:
    model = build_model(MODEL, SHAPE, CLASSES, seed=0)
    replica = Replica(
        model=model,
        optimizer=SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True),
        clock=PhaseClock(),
        forward=model,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        communicator=communicator,
        node=communicator.rank,
    )
    replica.batch_fraction = 1 / communicator.world_size
    strategy = create_strategy(name, job.options if name == "overlap" else {})
    strategy.setup(replica)
    return strategy


def update(strategy: Strategy, inputs: Tensor, labels: Tensor) -> Update:
    replica = strategy.replica
    traffic = replica.communicator.traffic
    replica.communicator.barrier().wait()
    traffic.log = []
    interface = NetworkCounter(os.getpid())
    began, used = perf_counter(), process_time()
    strategy.backward(F.cross_entropy(replica.forward(inputs), labels) * replica.batch_fraction)
    strategy.step()
    ended, used = perf_counter(), process_time() - used
    counts, buckets = interface.totals(), []
    for each in traffic.log:
        assert each.completed is not None
        buckets.append((each.began, each.completed, each.bytes_sent))
    traffic.log = None
    sent = counts["network_bytes_sent"] - counts["loopback_bytes_sent"]
    return Update(began, ended, buckets, sent, used)


if __name__ == "__main__":
    main()
