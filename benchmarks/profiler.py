"""Overhead of `paceline profile`: step time with and without the profiler.

    python benchmarks/profiler.py [--quick] [--models lenet,resnet18] [--workers 2]

A script trains with DistributedDataParallel over gloo. The profiler is attached in every other
block of steps, in the same processes. The overhead is the increase in step time over paired blocks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from common.stats import quartiles
from paceline.measure.machine import hardware, software
from paceline.models.build import build_model
from paceline.profiler.session import Session


class Case(NamedTuple):
    steps: int
    """Per block."""
    batch: int
    shape: tuple[int, ...]
    classes: int = 10
    has_tokens: bool = False


CASES = {
    "softmax": Case(400, 16, (1, 28, 28)),
    "lenet": Case(150, 16, (1, 28, 28)),
    "resnet18": Case(4, 8, (3, 32, 32)),
    "gpt-nano": Case(20, 4, (64,), 256, has_tokens=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--models", default=",".join(CASES), help="models, separated by commas")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    machine, versions = hardware(), software()
    print(f"{machine['cpu']}, {machine['cores']} cores; torch {versions['torch']}")
    print(f"{options.workers} workers, one thread each, DDP over gloo\n")
    print(f"{'model':10} {'step, plain':>18} {'profiled':>18} {'overhead %':>24}  stated %")
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options.workers, name, 6 if options.quick else 30, folder)
            spawn(_worker, arguments, nprocs=options.workers)


def _worker(rank: int, workers: int, name: str, repeats: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=workers)
    block = _training(name, CASES[name])
    block(), block()
    plain: list[float] = []
    profiled: list[float] = []
    stated: list[float] = []
    for repeat in range(repeats):
        # Whichever comes second could profit from a warm cache.
        for is_profiled in (False, True) if repeat % 2 else (True, False):
            session = Session(Path(folder)) if is_profiled else None
            if session is not None:
                session.start()
            dist.barrier()
            seconds = block()
            (profiled if is_profiled else plain).append(seconds)
            if session is not None:
                session.close()
                stated.append(100 * session.log.measuring_seconds / (seconds * CASES[name].steps))
    if not rank:
        overheads = [100 * (one / other - 1) for one, other in zip(profiled, plain, strict=True)]
        times = [f"{1e3 * statistics.median(each):.3f} ms" for each in (plain, profiled)]
        print(
            f"{name:10} {times[0]:>18} {times[1]:>18} {quartiles(overheads):>24}"
            f"  {statistics.median(stated):.2f}",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


def _training(name: str, case: Case) -> Callable[[], float]:
    """A loop as users write it; returns the mean step time of one block."""
    model: nn.Module = build_model(
        name, case.shape, case.classes, seed=0, has_tokens=case.has_tokens
    )
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    samples = case.batch * case.steps
    inputs = torch.rand(samples, *case.shape)
    targets: Tensor = torch.randint(case.classes, (samples,))
    if case.has_tokens:
        inputs = torch.randint(case.classes, (samples, *case.shape))
        targets = torch.randint(case.classes, (samples, *case.shape))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=case.batch)

    def block() -> float:
        began = perf_counter()
        for batch, labels in loader:
            optimizer.zero_grad()
            outputs = model(batch)
            loss = F.cross_entropy(outputs.flatten(0, -2), labels.flatten())
            loss.backward()
            optimizer.step()
        return (perf_counter() - began) / case.steps

    return block


if __name__ == "__main__":
    main()
