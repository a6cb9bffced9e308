"""Compute the golden loss curves and write each to MODEL.json beside this file.

    python tests/models/golden/make.py [MODEL ...]

An independent implementation in float64, without `nn.Module`, optimizer or loss function: each
network is a sequence of operations, followed by cross entropy and SGD with momentum. Only gradients
come from autograd. The initial weights are those of seed 0, so a changed initialization changes the
curve, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.build import build_model

CLASSES = 10
Weights = Iterator[Tensor]
"""The parameters, in the order in which the network uses them."""


class Case(NamedTuple):
    """Settings of a curve; the learning rate changes the loss visibly in a few steps."""

    sample_shape: tuple[int, ...]
    batch: int
    losses: int
    lr: float
    momentum: float = 0.9


MNIST_SHAPE, CIFAR_SHAPE = (1, 28, 28), (3, 32, 32)

CASES = {
    "softmax": Case(MNIST_SHAPE, 32, 8, 0.01),
    "mlp": Case(CIFAR_SHAPE, 32, 8, 0.5),
    "lenet": Case(CIFAR_SHAPE, 32, 8, 0.1),
    "cnn": Case(MNIST_SHAPE, 16, 6, 0.05),
    "strided_cnn": Case(CIFAR_SHAPE, 16, 6, 0.01),
    "whitened_cnn": Case((3, 20, 20), 8, 4, 0.2),
    "vgg11": Case(CIFAR_SHAPE, 4, 4, 2e-5),
    "vgg13": Case(MNIST_SHAPE, 4, 4, 1e-5),
    "vgg16": Case(CIFAR_SHAPE, 4, 4, 5e-6),
    "vgg19": Case(CIFAR_SHAPE, 4, 4, 1e-6),
    "resnet18": Case((3, 16, 16), 8, 4, 1e-4),
    "resnet34": Case((3, 16, 16), 8, 4, 2e-5),
}
"""Batch norm makes the first gradients large, so the learning rate is small."""


def batch(sample_shape: tuple[int, ...], samples: int) -> tuple[Tensor, Tensor]:
    """Return inputs from -1 to 1 and labels from integer formulas, equal on every machine."""
    sample = torch.arange(samples).unsqueeze(1)
    pixel = torch.arange(torch.Size(sample_shape).numel()).unsqueeze(0)
    levels = (pixel * pixel * (2 * sample + 3) + 37 * pixel + 101 * sample) % 255
    inputs = levels.reshape(samples, *sample_shape).double() / 127 - 1
    return inputs, 7 * torch.arange(samples) % CLASSES


def linear(inputs: Tensor, weights: Weights) -> Tensor:
    return inputs @ next(weights).T + next(weights)


def softmax(images: Tensor, weights: Weights) -> Tensor:
    return linear(images.flatten(1), weights)


def mlp(images: Tensor, weights: Weights) -> Tensor:
    hidden = images.flatten(1)
    for _ in range(6):
        hidden = linear(hidden, weights).clamp(min=0)
    return linear(hidden, weights)


def lenet(images: Tensor, weights: Weights) -> Tensor:
    for _ in range(2):
        images = halve(F.conv2d(images, next(weights), next(weights)).clamp(min=0))
    return linear(linear(images.flatten(1), weights).clamp(min=0), weights)


def cnn(images: Tensor, weights: Weights) -> Tensor:
    for _ in range(2):
        images = F.conv2d(images, next(weights), next(weights)).clamp(min=0)
    return linear(linear(halve(images).flatten(1), weights).clamp(min=0), weights)


def strided_cnn(images: Tensor, weights: Weights) -> Tensor:
    images = F.conv2d(images, next(weights), stride=3, padding=2)
    images = halve(F.conv2d(normalize(images, weights).clamp(min=0), next(weights), padding=1))
    images = normalize(images, weights).clamp(min=0)
    return linear(linear(images.flatten(1), weights).clamp(min=0), weights)


def whitened_cnn(images: Tensor, weights: Weights) -> Tensor:
    images = gelu(F.conv2d(images, next(weights)))
    for _ in range(3):
        images = gelu(normalize(halve(F.conv2d(images, next(weights), padding=1)), weights))
        images = gelu(convolve(images, weights, padding=1))
    return images.amax((2, 3)) @ next(weights).T / 9


def vgg(*convolutions: int) -> Callable[[Tensor, Weights], Tensor]:
    def forward(images: Tensor, weights: Weights) -> Tensor:
        border = (32 - images.shape[-1]) // 2
        images = F.pad(images, [border] * 4)
        for stage in convolutions:
            for _ in range(stage):
                images = F.conv2d(images, next(weights), next(weights), padding=1)
                images = normalize(images, weights).clamp(min=0)
            images = halve(images)
        return linear(images.flatten(1), weights)

    return forward


def resnet(*blocks: int) -> Callable[[Tensor, Weights], Tensor]:
    def forward(images: Tensor, weights: Weights) -> Tensor:
        images = convolve(images, weights, padding=1).clamp(min=0)
        for stage, count in enumerate(blocks):
            for block in range(count):
                shrinks = stage > 0 and block == 0
                stride = 2 if shrinks else 1
                inner = convolve(images, weights, stride, padding=1).clamp(min=0)
                inner = convolve(inner, weights, padding=1)
                images = convolve(images, weights, stride) if shrinks else images
                images = (images + inner).clamp(min=0)
        return linear(images.mean((2, 3)), weights)

    return forward


def convolve(images: Tensor, weights: Weights, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolution without bias, then batch norm."""
    return normalize(F.conv2d(images, next(weights), stride=stride, padding=padding), weights)


def normalize(images: Tensor, weights: Weights) -> Tensor:
    """Batch norm in training mode: mean and biased variance of each channel."""
    centered = images - images.mean((0, 2, 3), keepdim=True)
    scaled = centered / (centered.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
    return scaled * next(weights).view(1, -1, 1, 1) + next(weights).view(1, -1, 1, 1)


def gelu(images: Tensor) -> Tensor:
    return images * (1 + torch.erf(images / 2**0.5)) / 2


def halve(images: Tensor) -> Tensor:
    """Max pooling over 2x2 pixels; an odd last row or column is dropped."""
    height, width = images.shape[2] // 2 * 2, images.shape[3] // 2 * 2
    images = images[:, :, :height, :width]
    return images.reshape(*images.shape[:2], height // 2, 2, width // 2, 2).amax((3, 5))


FORWARD: dict[str, Callable[[Tensor, Weights], Tensor]] = {
    "softmax": softmax,
    "mlp": mlp,
    "lenet": lenet,
    "cnn": cnn,
    "strided_cnn": strided_cnn,
    "whitened_cnn": whitened_cnn,
    "vgg11": vgg(1, 1, 2, 2, 2),
    "vgg13": vgg(2, 2, 2, 2, 2),
    "vgg16": vgg(2, 2, 3, 3, 3),
    "vgg19": vgg(2, 2, 4, 4, 4),
    "resnet18": resnet(2, 2, 2, 2),
    "resnet34": resnet(3, 4, 6, 3),
}


def reference_losses(name: str, case: Case) -> list[float]:
    """Return the loss before each of the first updates, all on one batch."""
    model = build_model(name, case.sample_shape, CLASSES, seed=0)
    weights = [
        weight.detach().double().requires_grad_(weight.requires_grad)
        for weight in model.parameters()
    ]
    trained = [weight for weight in weights if weight.requires_grad]
    velocities = [torch.zeros_like(weight) for weight in trained]
    images, labels = batch(case.sample_shape, case.batch)
    losses = []
    for _ in range(case.losses):
        remaining = iter(weights)
        scores = FORWARD[name](images, remaining)
        if next(remaining, None) is not None:
            raise ValueError(f"{name} has parameters that the reference does not use")
        right = scores[torch.arange(case.batch), labels]
        loss = (scores.exp().sum(1).log() - right).mean()
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, trained)
        with torch.no_grad():
            for weight, velocity, gradient in zip(trained, velocities, gradients, strict=True):
                velocity.mul_(case.momentum).add_(gradient)
                weight.sub_(case.lr * velocity)
    return losses


def main() -> None:
    for name in sys.argv[1:] or CASES:
        curve = {**CASES[name]._asdict(), "losses": reference_losses(name, CASES[name])}
        path = Path(__file__).with_name(f"{name}.json")
        path.write_text(json.dumps(curve, indent=1) + "\n")


if __name__ == "__main__":
    main()
