"""Step time of DistributedDataParallel with the backend `paceline` and with gloo.

    python benchmarks/backend.py [--models lenet,mlp] [--workers 2] [--threads 1] [--blocks 20]
                                 [--batch-per-worker 16]

For each model, both backends train in the same processes and alternate in short blocks of steps, so
that background load affects both equally; ratios compare adjacent blocks. The result depends on
whether cores are idle: `taskset -c 0,1 python ...` leaves two workers no spare core. Times are rank
0's, as the median and quartiles over the blocks.
"""

from __future__ import annotations

import argparse
import os
import socket
from time import perf_counter

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import paceline.backend
from common.stats import quartiles
from paceline.comm.process_groups import use_interface_of
from paceline.measure.machine import hardware, software
from paceline.models.build import build_model

SHAPE, CLASSES = (3, 32, 32), 10
BACKENDS = ("gloo", paceline.torch_backend.NAME)
SECONDS_PER_BLOCK = 0.3


class Contender:
    """A model trained with one of the backends."""

    def __init__(self, model: str, backend: str, batch: int) -> None:
        self._replica = DistributedDataParallel(
            build_model(model, SHAPE, CLASSES, seed=0),
            process_group=dist.new_group(backend=backend),
        )
        self._optimizer = SGD(self._replica.parameters(), lr=0.01)
        self._inputs = torch.randn(batch, *SHAPE)
        self._labels = torch.randint(CLASSES, (batch,))
        self.seconds: list[float] = []

    def run(self, steps: int) -> float:
        """Return the seconds per step."""
        dist.barrier()
        began = perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad()
            F.cross_entropy(self._replica(self._inputs), self._labels).backward()
            self._optimizer.step()
        return (perf_counter() - began) / steps


def compare(model: str, batch: int, blocks: int) -> None:
    contenders = [Contender(model, backend, batch) for backend in BACKENDS]
    first = max(contender.run(3) for contender in contenders)
    steps = torch.tensor([max(1, round(SECONDS_PER_BLOCK / first))])
    dist.broadcast(steps, 0)
    for number in range(blocks):
        for contender in contenders if number % 2 else reversed(contenders):
            contender.seconds.append(contender.run(int(steps)))
    if dist.get_rank() == 0:
        gloo, ours = (contender.seconds for contender in contenders)
        times = [a / b for a, b in zip(gloo, ours, strict=True)]
        cells = [
            *(quartiles([1e3 * each for each in part]) for part in (gloo, ours)),
            quartiles(times),
        ]
        print(f"{model:9}" + "".join(f"{cell:>26}" for cell in cells), flush=True)


def work(rank: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": options.workers}
    os.environ.update({name: str(value) for name, value in {**place, "RANK": rank}.items()})
    with use_interface_of("127.0.0.1"):
        dist.init_process_group("gloo")
        for model in options.models.split(","):
            compare(model, options.batch_per_worker, options.blocks)
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--models", default="lenet,mlp,vgg11")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-per-worker", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=20)
    options = parser.parse_args()
    machine = hardware()
    print(f"{machine['cpu']}, {machine['cores']} cores, torch {software()['torch']}")
    print(f"{options.workers} workers of {options.threads} threads, n = {options.blocks} blocks")
    titles = ("gloo, ms per step", "paceline, ms per step", "speedup")
    print(" " * 9 + "".join(f"{title:>26}" for title in titles))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(work, (port, options), options.workers)


if __name__ == "__main__":
    main()
