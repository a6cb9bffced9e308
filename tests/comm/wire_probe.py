"""Run in a network namespace of its own: prints what was counted and what the kernel saw go by.

Nobody else sends there, so what the loopback device sent is what these workers sent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.comm import ALGORITHMS
from paceline.comm.communicator import Communicator
from paceline.comm.work import Work
from worker_pool import WorkerPool

WORLD_SIZE = 3
ELEMENTS = 600_000


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
    transfer(communicator, name)  # connections that are made when first used are made now
    communicator.barrier().wait()
    count = communicator.traffic.counts["gradients"]
    counted, seen = count.bytes_sent, loopback_bytes_sent()
    communicator.barrier().wait()
    transfer(communicator, name)
    communicator.barrier().wait()
    return count.bytes_sent - counted, loopback_bytes_sent() - seen


def main() -> None:
    account = {}
    with WorkerPool(WORLD_SIZE) as pool:
        for name in (*ALGORITHMS.names(), "broadcast", "reduce_scatter", "all_gather"):
            results = pool.run(WORLD_SIZE, counted_and_seen, name)
            account[name] = {
                "counted": sum(counted for counted, _ in results),
                "seen": max(seen for _, seen in results),
            }
    json.dump(account, sys.stdout)


if __name__ == "__main__":
    main()
