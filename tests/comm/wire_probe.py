"""Print the counted bytes and the bytes of the kernel; runs in its own network namespace.

No other process sends there, so the loopback device sends only what these workers send.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.comm import hierarchical
from paceline.comm.algorithms import ALGORITHMS
from paceline.comm.communicator import Communicator
from paceline.comm.hierarchical import HierarchicalCommunicator
from paceline.comm.work import Work
from paceline.measure.traffic import Traffic
from tests.support.worker_pool import WorkerPool

ELEMENTS = 2_400_000


def loopback_bytes_sent() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line for line in lines if line.strip().startswith("lo:")).split()
    return int(fields[9])


def transfer(communicator: Communicator, name: str) -> None:
    tensor = torch.zeros(ELEMENTS)
    collectives: dict[str, Callable[[], Work]] = {
        "broadcast": lambda: communicator.broadcast(tensor, 0, "gradients"),
        "reduce_scatter": lambda: communicator.reduce_scatter(tensor, "gradients"),
        "all_gather": lambda: communicator.all_gather(tensor, "gradients"),
    }
    if name in collectives:
        collectives[name]().wait()
    else:
        ALGORITHMS.load(name)().all_reduce(communicator, tensor, "gradients")


def counted_and_seen(communicator: Communicator, name: str) -> tuple[int, int]:
    return measure(communicator, communicator, communicator.traffic, name)


def counted_across_nodes_and_seen(communicator: Communicator, name: str) -> tuple[int, int]:
    """Measure two nodes with two ranks each; shared memory does not use the kernel's network."""
    with hierarchical.connect(communicator, communicator.rank // 2) as two_level:
        assert isinstance(two_level, HierarchicalCommunicator)
        return measure(communicator, two_level, two_level.network.traffic, name)


def measure(
    all_workers: Communicator, two_level: Communicator, traffic: Traffic, name: str
) -> tuple[int, int]:
    transfer(two_level, name)  # Creates connections that are created on first use.
    all_workers.barrier().wait()
    count = traffic.counts["gradients"]
    counted, seen = count.bytes_sent, loopback_bytes_sent()
    all_workers.barrier().wait()
    transfer(two_level, name)
    all_workers.barrier().wait()
    return count.bytes_sent - counted, loopback_bytes_sent() - seen


def main() -> None:
    account = {}
    collectives = ("broadcast", "reduce_scatter", "all_gather")
    cases = [(3, counted_and_seen, name) for name in (*ALGORITHMS.names(), *collectives)]
    cases += [(4, counted_across_nodes_and_seen, name) for name in ("library", *collectives)]
    with WorkerPool(4) as pool:
        for world_size, function, name in cases:
            results = pool.run(world_size, function, name)
            account[f"{function.__name__} {name}"] = {
                "counted": sum(counted for counted, _ in results),
                "seen": max(seen for _, seen in results),
            }
    json.dump(account, sys.stdout)


if __name__ == "__main__":
    main()
