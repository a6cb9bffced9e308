"""Training on CIFAR-10 as the airbench94 recipe describes it (arXiv 2404.00498), in plain PyTorch.

    python train_airbench.py --data DIR [--seeds 5] [--compile max-autotune]

DIR has `cifar-10-batches-py`. Images stay on the GPU, in half precision and channels-last; one JSON
line per seed has the accuracy with six views of each test image, and the seconds of training alone
and with that evaluation. Without a GPU it runs in fp32 on the CPU, which takes minutes per epoch.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16 if DEVICE.type == "cuda" else torch.float32
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

EPOCHS = 9.9
BATCH = 1024
LEARNING_RATE = 11.5
"""For 1024 examples, with the momentum's factor included."""
MOMENTUM = 0.85
WEIGHT_DECAY = 0.0153
BIAS_RATE_FACTOR = 64.0
LABEL_SMOOTHING = 0.2
WHITEN_BIAS_EPOCHS = 3
WHITEN_IMAGES = 5000
WIDTHS = (64, 256, 256)
LOOKAHEAD_STEPS = 5
PAD = 2


def load(folder: Path, samples: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalized training images, labels, test images, labels."""

    def read(*names: str) -> tuple[Tensor, Tensor]:
        images, labels = [], []
        for name in names:
            batch = pickle.loads((folder / name).read_bytes(), encoding="bytes")  # noqa: S301 - as the data's authors publish them
            images.append(torch.from_numpy(np.asarray(batch[b"data"])))
            labels.append(torch.tensor(batch[b"labels"]))
        pixels = torch.cat(images)[:samples].to(DEVICE).view(-1, 3, 32, 32).to(DTYPE) / 255
        mean = torch.tensor(MEAN, device=DEVICE, dtype=DTYPE).view(3, 1, 1)
        std = torch.tensor(STD, device=DEVICE, dtype=DTYPE).view(3, 1, 1)
        normalized = ((pixels - mean) / std).to(memory_format=torch.channels_last)
        return normalized, torch.cat(labels)[:samples].to(DEVICE)

    return *read(*(f"data_batch_{number}" for number in range(1, 6))), *read("test_batch")


class Norm(nn.BatchNorm2d):
    """Batch norm in fp32 with a fixed scale."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-12, momentum=0.4)
        self.weight.requires_grad = False


def convolution(inputs: int, outputs: int) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, padding="same", bias=False)
    nn.init.dirac_(layer.weight.data[:inputs])
    return layer


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        convolution(inputs, outputs), nn.MaxPool2d(2), Norm(outputs), nn.GELU(),
        convolution(outputs, outputs), Norm(outputs), nn.GELU(),
    )  # fmt: skip


class Scale(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits / 9


def build_model(images: Tensor) -> nn.Sequential:
    """The network, with a first layer that whitens patches of these images."""
    whiten = nn.Conv2d(3, 24, 2)
    whiten.weight.requires_grad = False
    nn.init.constant_(whiten.bias, 0.0)  # type: ignore[arg-type]  # it has a bias
    patches = images.float().unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5)
    flat = patches.reshape(-1, 12)
    values, vectors = torch.linalg.eigh(flat.T @ flat / len(flat))
    filters = (vectors / (values + 5e-4).sqrt()).T.flip(0).reshape(12, 3, 2, 2)
    whiten.weight.data.copy_(torch.cat([filters, -filters]))
    model = nn.Sequential(
        whiten, nn.GELU(),
        block(24, WIDTHS[0]), block(WIDTHS[0], WIDTHS[1]), block(WIDTHS[1], WIDTHS[2]),
        nn.MaxPool2d(3), nn.Flatten(), nn.Linear(WIDTHS[2], 10, bias=False), Scale(),
    ).to(DEVICE)  # fmt: skip
    model.to(DTYPE)
    for layer in model.modules():
        if isinstance(layer, Norm):
            layer.float()
    for weight in model.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.to(memory_format=torch.channels_last)
    return model


class Augmentation:
    """Epochs of images, shifted by up to two pixels and flipped in every other epoch."""

    def __init__(self, images: Tensor) -> None:
        flips = torch.rand(len(images), device=DEVICE) < 0.5
        first = torch.where(flips.view(-1, 1, 1, 1), images.flip(3), images)
        self._padded = F.pad(first, (PAD,) * 4, mode="reflect").permute(0, 2, 3, 1).contiguous()

    def epoch(self, number: int) -> Tensor:
        count, side = len(self._padded), self._padded.shape[1] - 2 * PAD
        offsets = torch.randint(2 * PAD + 1, (2, count, 1), device=DEVICE)
        rows, columns = offsets + torch.arange(side, device=DEVICE)
        samples = torch.arange(count, device=DEVICE).view(-1, 1, 1)
        images = self._padded[samples, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)
        return images.flip(3) if number % 2 else images


class Lookahead:
    """A slow copy of the weights that the training returns to every few steps."""

    def __init__(self, model: nn.Module) -> None:
        self._fast = [
            tensor for tensor in model.state_dict().values() if tensor.is_floating_point()
        ]
        self._slow = [tensor.clone() for tensor in self._fast]

    def update(self, decay: float) -> None:
        for slow, fast in zip(self._slow, self._fast, strict=True):
            slow.lerp_(fast, 1 - decay)
            fast.copy_(slow)


def build_optimizer(model: nn.Module, batch: int) -> torch.optim.SGD:
    """SGD for the sum of losses over a batch."""
    per_example = 1024 * (1 + 1 / (1 - MOMENTUM))
    rate, decay = LEARNING_RATE / per_example, WEIGHT_DECAY * batch / per_example
    biases = [layer.bias for layer in model.modules() if isinstance(layer, Norm)]
    own = {id(bias) for bias in biases}
    others = [
        weight for weight in model.parameters() if weight.requires_grad and id(weight) not in own
    ]
    bias_rate = rate * BIAS_RATE_FACTOR
    groups = [
        {"params": biases, "lr": bias_rate, "weight_decay": decay / bias_rate},
        {"params": others, "lr": rate, "weight_decay": decay / rate},
    ]
    return torch.optim.SGD(groups, lr=rate, momentum=MOMENTUM, nesterov=True)


def rate_factor(progress: float) -> float:
    """A triangle from 0.2 to 1 at 23% of the training and down to 0.07."""
    return float(np.interp(progress, [0, 0.23, 1], [0.2, 1, 0.07]))


def train(
    model: nn.Sequential, forward: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor
) -> None:
    batch = min(BATCH, len(images))
    per_epoch = len(images) // batch
    steps = math.ceil(EPOCHS * per_epoch)
    whiten = model[0]
    whiten.bias.requires_grad = True
    optimizer = build_optimizer(model, batch)
    base_rates = [group["lr"] for group in optimizer.param_groups]
    lookahead = Lookahead(model)
    augmentation = Augmentation(images)
    model.train()
    step = 0
    for epoch in range(math.ceil(EPOCHS)):
        whiten.bias.requires_grad = epoch < WHITEN_BIAS_EPOCHS
        epoch_images = augmentation.epoch(epoch)
        order = torch.randperm(len(images), device=DEVICE)
        for index in range(per_epoch):
            rows = order[index * batch : (index + 1) * batch]
            outputs = forward(epoch_images[rows])
            loss = F.cross_entropy(
                outputs, labels[rows], label_smoothing=LABEL_SMOOTHING, reduction="sum"
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            for group, rate in zip(optimizer.param_groups, base_rates, strict=True):
                group["lr"] = rate * rate_factor(step / steps)
            optimizer.step()
            step += 1
            if step % LOOKAHEAD_STEPS == 0:
                lookahead.update(0.95**LOOKAHEAD_STEPS * (step / steps) ** 3)
            if step == steps:
                lookahead.update(1.0)
                return


@torch.inference_mode()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy with one view, and with six: mirrored, and shifted by one pixel."""
    model.eval()
    one = six = 0
    for begin in range(0, len(images), 2000):
        views, targets = images[begin : begin + 2000], labels[begin : begin + 2000]
        plain = model(views).float()
        padded = F.pad(views, (1,) * 4, mode="reflect")
        total = 2 * (plain + model(views.flip(3)).float())
        for shifted in (padded[:, :, :-2, :-2], padded[:, :, 2:, 2:]):
            total = total + model(shifted).float() + model(shifted.flip(3)).float()
        one += int((plain.argmax(1) == targets).sum())
        six += int((total.argmax(1) == targets).sum())
    return one / len(images), six / len(images)


def synchronize() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--stdin", action="store_true", help="read seeds from standard input")
    parser.add_argument("--samples", type=int, help="use only the first N images of both splits")
    parser.add_argument("--compile", metavar="MODE", help="mode of torch.compile")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    images, labels, test_images, test_labels = load(
        options.data / "cifar-10-batches-py", options.samples
    )
    model = build_model(images[:WHITEN_IMAGES])
    forward = torch.compile(model, mode=options.compile) if options.compile else model
    seeds = map(int, sys.stdin) if options.stdin else range(options.seeds)
    for seed in seeds:
        torch.manual_seed(seed)
        began = synchronize()
        # Into the same tensors, so that a compiled model stays valid.
        model.load_state_dict(build_model(images[:WHITEN_IMAGES]).state_dict())
        train(model, forward, images, labels)
        trained = synchronize()
        one, six = evaluate(model, test_images, test_labels)
        ended = synchronize()
        result = {
            "seed": seed,
            "accuracy": six,
            "one_view_accuracy": one,
            "train_seconds": trained - began,
            "seconds": ended - began,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
