"""What measuring the gradient noise scale costs.

    python benchmarks/noise_scale.py [--models lenet,mlp,vgg11] [--strategies allreduce,ddp]
                                     [--repeats 5]

Two workers with one thread each train with every second step measured, so that steps with and
without the measurement alternate. The cost of a measured step is the median difference between it
and the step before, in wall time and in CPU time of the training thread, which other processes
disturb less. Runs measure every 50th step, so their cost is a fiftieth of it. Times are rank 0's,
with the coordination once a second; the spread is that of the repeats.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection as Pipe
from time import perf_counter, thread_time
from typing import NamedTuple

import torch

from common.stats import min_max
from paceline.comm.communicator import Communicator
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.torch_distributed import connect
from paceline.config import RunConfig, from_mapping
from paceline.data.loading import load_dataset
from paceline.data.pipeline import InputPipeline
from paceline.data.sampling import GlobalBatchSampler
from paceline.measure.gradient_noise import GradientNoise
from paceline.measure.machine import hardware, software
from paceline.measure.memory import WorkerMemory
from paceline.measure.phase_clock import PhaseClock
from paceline.models.build import build_model
from paceline.strategies import create_strategy
from paceline.strategies.replica import Replica
from paceline.training.coordination import NOISE_EVERY, StepCoordinator
from paceline.training.optimizer import build_optimizer
from paceline.training.step import TrainStep

WORKERS = 2
WARMUP_STEPS = 16
PAIRS = {"lenet": 200, "mlp": 100, "vgg11": 8}
"""Pairs of steps in each repeat."""
STRATEGIES = ("allreduce", "overlap", "ddp", "sharded", "shared", "fsdp")


class Seconds(NamedTuple):
    step: float
    """Of a step that is not measured."""
    cost: float
    """Of a measurement."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(PAIRS))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{hardware()['cpu']}, {os.cpu_count()} cores, torch {software()['torch']}")
    print(f"{WORKERS} workers, batch of 64, {options.repeats} repeats: median (min-max)")
    print(f"{'':20}{'ms per step':>20}{'us if measured':>20}{'% of a step':>22}", end="")
    print(f"{'% of its CPU time':>22}")
    for model in options.models.split(","):
        for strategy in options.strategies.split(","):
            repeats = measure_apart(model, strategy, options.repeats)
            walls, cpus = zip(*repeats, strict=True)
            plain = [1e3 * wall.step for wall in walls]
            extra = [1e6 * wall.cost for wall in walls]
            print(f"{model:<8}{strategy:<12}{min_max(plain):>20}", end="")
            print(f"{min_max(extra, '.0f'):>20}", end="")
            for clock in (walls, cpus):
                shares = [100 * each.cost / NOISE_EVERY / each.step for each in clock]
                print(f"{min_max(shares):>22}", end="")
            print(flush=True)


def measure_apart(model: str, strategy: str, repeats: int) -> list[tuple[Seconds, Seconds]]:
    """Wall and CPU time on rank 0, for each repeat."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=work, args=(rank, port, model, strategy, repeats, theirs))
        for rank in range(WORKERS)
    ]
    for process in processes:
        process.start()
    theirs.close()
    measured: list[tuple[Seconds, Seconds]] = ours.recv()
    for process in processes:
        process.join()
    return measured


def work(rank: int, port: int, model: str, strategy: str, repeats: int, pipe: Pipe) -> None:
    torch.set_num_threads(1)
    config = from_mapping(
        {
            "model": model,
            "strategy": strategy,
            "train_samples": 4096,
            "nproc_per_node": WORKERS,
            "precision": "fp32",
            "channels_last": "off",
        }
    )
    with connect(Rendezvous(rank, WORKERS, "127.0.0.1", port)) as communicator:
        measured = measure(config, communicator, PAIRS[model], repeats)
        communicator.barrier().wait()
    if rank == 0:
        pipe.send(measured)


def measure(
    config: RunConfig, communicator: Communicator, pairs: int, repeats: int
) -> list[tuple[Seconds, Seconds]]:
    data = load_dataset(config)
    model = build_model(config.model, data.sample_shape, data.classes, config.seed)
    order = GlobalBatchSampler(len(data.train), config.global_batch_size, config.seed)
    replica = Replica(
        model=model,
        optimizer=build_optimizer(config, model.parameters()),
        clock=PhaseClock(),
        forward=model,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        communicator=communicator,
        noise=GradientNoise(every=2),
    )
    strategy = create_strategy(config.strategy, config.options)
    strategy.setup(replica)
    coordinator = StepCoordinator(config, strategy, replica)
    step = TrainStep(
        config,
        replica,
        strategy,
        InputPipeline(data.train, data.transform, order, augment=(), seed=config.seed),
        coordinator,
        nullcontext(),
        WorkerMemory(torch.device("cpu")),
    )
    coordinator.start()
    found, iteration = [], 0
    for repeat in range(repeats + 1):
        walls, cpus = [], []
        for _ in range(2 * pairs if repeat else WARMUP_STEPS):
            began, cpu_began = perf_counter(), thread_time()
            step(iteration, communicator.rank)
            ended = perf_counter()
            coordinator.after_step(ended - began, config.global_batch_size, stop=False)
            walls.append(perf_counter() - began)
            cpus.append(thread_time() - cpu_began)
            iteration += 1
        found.append((compare(walls), compare(cpus)))
    strategy.finish()
    return found[1:]


def compare(seconds: Sequence[float]) -> Seconds:
    """Compare steps without a measurement to the next ones, which have one."""
    plain, measured = seconds[::2], seconds[1::2]
    costs = [one - other for one, other in zip(measured, plain, strict=True)]
    return Seconds(statistics.median(plain), statistics.median(costs))


if __name__ == "__main__":
    main()
