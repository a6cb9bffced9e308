"""Images per second of paceline's input pipeline and of an equivalent DataLoader.

Both apply a random crop with a padding of 4, a random flip and normalization to images of
32 x 32 x 3. The DataLoader's transforms process one sample in plain torch, as common libraries do.
The contenders are interleaved, so that background load affects all of them equally.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from paceline.data.dataset import Split
from paceline.data.image_transforms import ImageTransform
from paceline.data.pipeline import InputPipeline
from paceline.data.sampling import GlobalBatchSampler

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PAD = 4

READY_BATCHES = 4
"""Batches that a DataLoader with two workers prefetches."""
PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    batches: Iterator[int]
    """Yields the number of images of each batch it makes."""
    images: int
    """Batches to time per repeat."""


class OneByOne(Dataset[tuple[Tensor, int]]):
    """A map-style dataset that applies general-purpose transforms to each sample."""

    def __init__(self, split: Split) -> None:
        self.images, self.labels = split.inputs, split.targets.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = random_crop(self.images[index], 32, 32)
        if torch.rand(1) < 0.5:
            image = image.flip(-1)
        return normalise(image.to(torch.float32).div(255)), self.labels[index]


def random_crop(image: Tensor, height: int, width: int) -> Tensor:
    padded = F.pad(image, (PAD, PAD, PAD, PAD))
    top = int(torch.randint(0, padded.shape[-2] - height + 1, (1,)).item())
    left = int(torch.randint(0, padded.shape[-1] - width + 1, (1,)).item())
    return padded[..., top : top + height, left : left + width]


def normalise(image: Tensor) -> Tensor:
    """Like a reusable transform: its parameters are numbers, and it does not modify its input."""
    mean = torch.as_tensor(MEAN, dtype=image.dtype, device=image.device)
    std = torch.as_tensor(STD, dtype=image.dtype, device=image.device)
    if (std == 0).any():
        raise ValueError("a deviation of 0")
    return image.clone().sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))


def by_input_path(split: Split, batch_size: int) -> Iterator[int]:
    order = GlobalBatchSampler(len(split), batch_size, seed=0)
    path = InputPipeline(split, ImageTransform(MEAN, STD), order, augment=("crop", "flip"))
    for epoch in range(1_000_000):
        for index in range(order.batches_per_epoch):
            yield len(path.batch(epoch, index)[1])


def by_data_loader(split: Split, batch_size: int, workers: int) -> Iterator[int]:
    loader = DataLoader(
        OneByOne(split),
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    for _ in range(1_000_000):
        for _, labels in loader:
            yield len(labels)


def measure(contenders: Sequence[Contender], repeats: int) -> list[list[float]]:
    """Images per second of each contender in each repeat, interleaved."""
    rates: list[list[float]] = [[] for _ in contenders]
    for _ in range(repeats):
        for contender, found in zip(contenders, rates, strict=True):
            # Skip batches that were prefetched before the timing; and wait after it, since
            # workers that fill their queues would disturb the next contender.
            for _ in range(READY_BATCHES):
                next(contender.batches)
            images = 0
            begin = time.perf_counter()
            while images < contender.images:
                images += next(contender.batches)
            found.append(images / (time.perf_counter() - begin))
            time.sleep(PAUSE_SECONDS)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer images and repeats")
    parser.add_argument("--threads", type=int, default=1, help="torch's, in each process")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    samples, images, repeats = (5_000, 3_000, 5) if arguments.quick else (50_000, 10_000, 15)
    generator = torch.Generator().manual_seed(0)
    split = Split(
        torch.randint(256, (samples, 3, 32, 32), dtype=torch.uint8, generator=generator),
        torch.randint(10, (samples,), generator=generator),
    )
    print("Input path: pad 4, crop, flip and normalise 32 x 32 x 3 images to float32")
    print(f"{processor()}, {torch.get_num_threads()} torch thread(s) a process")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, n = {repeats} repeats")
    print(f"{'':34}{'images/s':>12}{'lowest':>12}{'highest':>12}")
    for batch_size in (64, 256):
        contenders = [
            # Much faster, so it needs more images for an equally precise timing.
            Contender("paceline", by_input_path(split, batch_size), 10 * images),
            Contender("DataLoader, num_workers=0", by_data_loader(split, batch_size, 0), images),
            Contender("DataLoader, num_workers=2", by_data_loader(split, batch_size, 2), images),
        ]
        rates = measure(contenders, repeats)
        for contender, found in zip(contenders, rates, strict=True):
            print(
                f"batch {batch_size:<4}{contender.name:<26}{statistics.median(found):>10,.0f}"
                f"{min(found):>12,.0f}{max(found):>12,.0f}"
            )
        ours, *theirs = (statistics.median(found) for found in rates)
        print(f"batch {batch_size:<4}paceline / best DataLoader: {ours / max(theirs):.1f}")


def processor() -> str:
    """The name of the processor, if the machine reports it."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return f"{names[0]}, {len(names)} logical CPUs" if names else platform.machine()


if __name__ == "__main__":
    main()
