"""Model and data of benchmarks/startup.py; the model marks the start of the second iteration."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

MARK = "STARTUP_MARK"
"""Environment variable: the file to write the time to."""


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 1, 28, 28, generator=generator)
    labels = torch.randint(0, 10, (256,), generator=generator)
    return (inputs, labels), (inputs[:64], labels[:64])


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
        )
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2 and os.environ.get("RANK") == "0":
            Path(os.environ[MARK]).write_text(repr(time.time()))
        outputs: Tensor = self.layers(inputs)
        return outputs
