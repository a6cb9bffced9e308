"""Loops of user scripts, measured in this process by the profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from paceline.profiler.collection import RankRecord, read_ranks
from paceline.profiler.session import Session
from paceline.records import RunFolder

STEP = ["input", "forward", "backward", "update"]
"""The phases of a step of `train_step`, with a batch of `loader`."""


class Profiled:
    """A session and what it recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.session = Session(folder)
        self.log = self.session.tracker.clock.start_log()

    @property
    def record(self) -> RankRecord:
        (record,) = read_ranks(RunFolder(self.folder))
        return record

    @property
    def phases(self) -> list[str]:
        """The phases in order, without `other` and repetitions."""
        names = [span.name for span in self.log.phases if span.name != "other"]
        return [name for name, _ in groupby(names)]


@contextmanager
def profiled(folder: Path) -> Iterator[Profiled]:
    """Measure a block as if it were a script."""
    measured = Profiled(folder)
    measured.session.start()
    try:
        yield measured
    finally:
        measured.session.close()


def loader(batches: int = 3, **settings: Any) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of four samples."""
    samples = 4 * batches
    return DataLoader(
        TensorDataset(torch.ones(samples, 2), torch.zeros(samples, 2)), batch_size=4, **settings
    )


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def sgd(net: nn.Module) -> SGD:
    return SGD(net.parameters(), lr=0.1)


def loss_of(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(net(inputs), targets)


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, *batch: Tensor) -> None:
    loss_of(net, *batch).backward()
    optimizer.step()
    optimizer.zero_grad()
