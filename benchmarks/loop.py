"""Overhead of paceline's training loop over the same loop in plain PyTorch.

    python benchmarks/loop.py [--models MODEL,...] [--pairs 25]

Both train one model on the same batches with one fused optimizer, in alternating blocks in one
process: two copies of a model differ by a few percent through their place in memory. The overhead
is the increase in iteration time over paired blocks.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch.nn import functional as F

from common.stats import quartiles
from paceline.comm import in_process
from paceline.config import RunConfig, from_mapping
from paceline.data.loading import load_dataset
from paceline.data.pipeline import InputPipeline
from paceline.data.sampling import GlobalBatchSampler
from paceline.measure.machine import hardware, software
from paceline.measure.memory import WorkerMemory
from paceline.measure.phase_clock import PhaseClock
from paceline.measure.tensorboard import TensorBoardWriter
from paceline.models.build import build_model
from paceline.records import EventWriter
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import SingleProcess
from paceline.training.coordination import StepCoordinator
from paceline.training.display import SilentDisplay
from paceline.training.evaluation import Evaluator
from paceline.training.loop import StopRequest, TrainingLoop
from paceline.training.optimizer import build_optimizer
from paceline.training.rank_report import RunTotals
from paceline.training.run_logger import RunLogger
from paceline.training.run_state import Progress
from paceline.training.step import TrainStep


class Case(NamedTuple):
    iterations: int
    """Per block."""
    batch: int
    limit: float
    """Allowed overhead in percent."""
    data: str = "digits"


CASES = {
    "lenet": Case(300, 64, 3.0),
    "vgg11": Case(6, 64, 1.0),
    "gpt-micro": Case(3, 16, 3.0, "stories"),
}

Block = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=25, help="pairs of blocks of each model")
    parser.add_argument("--models", default=",".join(CASES), help="models, separated by commas")
    options = parser.parse_args()
    print(f"{hardware()['cpu']}, {torch.get_num_threads()} threads, torch {software()['torch']}")
    print(f"{options.pairs} pairs of blocks; ms per iteration, median (quartiles)")
    print(f"{'model':<10}{'batch':>5}{'bare':>24}{'paceline':>24}{'more, %':>22}{'limit':>8}")
    for model in options.models.split(","):
        iterations, batch, limit, data = CASES[model]
        config = from_mapping(
            {
                "model": model,
                "data": data,
                "batch_size": batch,
                "iterations": iterations,
                "train_samples": 20_000,
                # A run chooses them by itself.
                "precision": "fp32",
                "channels_last": "off",
            }
        )
        with tempfile.TemporaryDirectory() as folder:
            trained = build(config)
            bare, ours = bare_block(config, trained), paceline_block(config, trained, Path(folder))
            times = alternate(bare, ours, options.pairs)
        ratios = [100 * (mine / plain - 1) for plain, mine in times]
        cells = (
            quartiles([1e3 * t / iterations for t in column]) for column in zip(*times, strict=True)
        )
        print(f"{model:<10}{batch:>5}" + "".join(f"{cell:>24}" for cell in cells), end="")
        print(f"{quartiles(ratios):>22}{limit:>7.0f}%")


def alternate(bare: Block, ours: Block, repeats: int) -> list[tuple[float, float]]:
    """Pairs of times; the order alternates, so that neither always runs second."""
    bare(), ours()
    pairs = []
    for repeat in range(repeats):
        if repeat % 2:
            plain, mine = bare(), ours()
        else:
            mine, plain = ours(), bare()
        pairs.append((plain, mine))
    return pairs


class Trained(NamedTuple):
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    inputs: InputPipeline


def build(config: RunConfig) -> Trained:
    data = load_dataset(config)
    model = build_model(
        config.model, data.sample_shape, data.classes, config.seed, has_tokens=data.has_tokens
    )
    order = GlobalBatchSampler(len(data.train), config.global_batch_size, config.seed)
    inputs = InputPipeline(data.train, data.transform, order, augment=(), seed=config.seed)
    return Trained(model, build_optimizer(config, model.parameters()), inputs)


def bare_block(config: RunConfig, trained: Trained) -> Block:
    model, optimizer, inputs = trained
    assert config.iterations is not None
    iterations, per_epoch = config.iterations, inputs.order.batches_per_epoch

    def block() -> float:
        begin = perf_counter()
        for iteration in range(iterations):
            x, y = inputs.batch(*divmod(iteration, per_epoch))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
            loss.backward()
            optimizer.step()
        return perf_counter() - begin

    return block


def paceline_block(config: RunConfig, trained: Trained, folder: Path) -> Block:
    model, optimizer, inputs = trained
    data = load_dataset(config)
    data = replace(data, test=data.test.head(1))
    assert config.iterations is not None
    iterations = config.iterations
    events = EventWriter(folder / "events-0.jsonl")
    tensorboard = TensorBoardWriter(folder / "tensorboard")

    def block() -> float:
        clock = PhaseClock()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        communicator = in_process.single()
        replica = Replica(model, optimizer, clock, model, scaler, communicator)
        strategy = SingleProcess()
        strategy.setup(replica)
        cpu = torch.device("cpu")
        memory = WorkerMemory(cpu)
        coordinator = StepCoordinator(config, strategy, replica)
        logger = RunLogger(
            events,
            tensorboard,
            SilentDisplay(),
            iterations,
            clock,
            coordinator,
            strategy,
        )
        loop = TrainingLoop(
            config,
            Progress(),
            RunTotals(clock, replica, None),
            TrainStep(config, replica, strategy, inputs, coordinator, nullcontext(), memory),
            Evaluator(config, replica, strategy, data, cpu, nullcontext()),
            logger,
            coordinator,
            StopRequest(),
        )
        coordinator.start()
        loop.run()
        clock.enter("other")
        return clock.wall_seconds - clock.seconds["evaluate"]

    return block


if __name__ == "__main__":
    main()
