"""ResNet-18 on CIFAR-10 as many scripts train it: a DataLoader with worker processes that transform
one image at a time, fp32, and a plain loop.

    python train_resnet.py --data-dir DIR --windows 4 32:200 128:391

Trains once for each BATCH:STEPS and prints one line of JSON with the duration of each window of
STEPS steps, in seconds; the first window includes warm-up.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


class Cifar10(Dataset[tuple[Tensor, int]]):
    def __init__(self, folder: Path) -> None:
        batches = []
        for number in range(1, 6):
            with (folder / "cifar-10-batches-py" / f"data_batch_{number}").open("rb") as file:
                batches.append(pickle.load(file, encoding="bytes"))  # noqa: S301 - the official files
        images = np.concatenate([batch[b"data"] for batch in batches])
        self.images = torch.from_numpy(images.reshape(-1, 3, 32, 32))
        self.labels: list[int] = [label for batch in batches for label in batch[b"labels"]]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = F.pad(self.images[index], (4, 4, 4, 4))
        top, left = random.randrange(9), random.randrange(9)
        image = image[:, top : top + 32, left : left + 32]
        if random.random() < 0.5:
            image = image.flip(2)
        return (image.float() / 255 - MEAN) / DEVIATION, self.labels[index]


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(self.body(inputs) + self.shortcut(inputs))


def resnet18() -> nn.Module:
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    blocks = []
    width = 64
    for outputs in (64, 128, 256, 512):
        blocks += [Block(width, outputs, 1 if outputs == 64 else 2), Block(outputs, outputs, 1)]
        width = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*stem, *blocks, *head)


def endless(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--loaders", type=int, default=8, help="processes of the DataLoader")
    parser.add_argument("sizes", nargs="+", metavar="BATCH:STEPS")
    arguments = parser.parse_args()
    dataset = Cifar10(arguments.data_dir)
    for size in arguments.sizes:
        batch, steps = map(int, size.split(":"))
        seconds, loss = train(dataset, batch, steps, arguments.windows, arguments.loaders)
        print(json.dumps({"batch": batch, "seconds": seconds, "loss": loss}), flush=True)


def train(
    dataset: Cifar10, batch: int, steps: int, windows: int, loaders: int
) -> tuple[list[float], float]:
    """Return the seconds of each window, and the mean loss of the last."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(
        dataset,
        batch,
        shuffle=True,
        num_workers=loaders,
        pin_memory=device.type == "cuda",
        persistent_workers=True,
    )
    model = resnet18().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    batches = endless(loader)
    seconds = []
    for _ in range(windows):
        began = perf_counter()
        total = torch.zeros((), device=device)
        for _ in range(steps):
            inputs, labels = next(batches)
            inputs = inputs.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean_loss = total.item() / steps
        seconds.append(perf_counter() - began)
    return seconds, mean_loss


if __name__ == "__main__":
    main()
