"""Shared by the three training scripts: a small network, samples and output."""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor, nn

BATCH = 16
STEPS = 240
UNTIMED_STEPS = 40


def backend() -> str:
    """The name of the torch.distributed backend, from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="gloo")
    return str(parser.parse_args().backend)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batches(rank: int) -> tuple[Tensor, Tensor]:
    """This worker's inputs and labels, one batch per step: which of ten spots is brightest."""
    generator = torch.Generator().manual_seed(rank)
    labels = torch.randint(10, (STEPS, BATCH), generator=generator)
    inputs = torch.randn(STEPS, BATCH, 3, 32, 32, generator=generator)
    rows = 3 * labels.view(STEPS, BATCH, 1, 1, 1) + torch.arange(2).view(2, 1)
    inputs.scatter_add_(3, rows.expand(STEPS, BATCH, 3, 2, 32), torch.ones_like(inputs[..., :2, :]))
    return inputs, labels


class Report:
    """Print the losses of all steps and the step time."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._ends: list[float] = []

    def step(self, loss: Tensor) -> None:
        self._losses.append(loss.item())
        self._ends.append(perf_counter())

    def print(self) -> None:
        timed = self._ends[UNTIMED_STEPS:]
        seconds = statistics.fmean(b - a for a, b in pairwise(timed))
        print(json.dumps({"step_seconds": seconds, "losses": self._losses}), flush=True)
