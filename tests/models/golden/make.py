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
from torch import Tensor, nn

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
    vocabulary: int | None = None
    """Of samples that are tokens."""


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
    "gpt-nano": Case((16,), 8, 8, 0.4, vocabulary=40),
    "gpt-micro": Case((16,), 8, 6, 0.05, vocabulary=40),
    "gpt-mini": Case((12,), 4, 4, 0.05, vocabulary=40),
}
"""Batch norm makes the first gradients large, so the learning rate is small."""


def build(name: str, case: Case, seed: int = 0) -> nn.Module:
    has_tokens = case.vocabulary is not None
    classes = case.vocabulary or CLASSES
    return build_model(name, case.sample_shape, classes, seed, has_tokens=has_tokens)


def batch(case: Case) -> tuple[Tensor, Tensor]:
    """Return inputs and labels from integer formulas, equal on every machine.

    Inputs are numbers from -1 to 1, or windows of tokens whose labels are the next tokens.
    """
    sample = torch.arange(case.batch).unsqueeze(1)
    elements = torch.Size(case.sample_shape).numel()
    pixel = torch.arange(elements + (case.vocabulary is not None)).unsqueeze(0)
    levels = (pixel * pixel * (2 * sample + 3) + 37 * pixel + 101 * sample) % 255
    if case.vocabulary is not None:
        tokens = levels % case.vocabulary
        return tokens[:, :-1], tokens[:, 1:]
    inputs = levels.reshape(case.batch, *case.sample_shape).double() / 127 - 1
    return inputs, 7 * torch.arange(case.batch) % CLASSES


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


def gpt(blocks: int, heads: int) -> Callable[[Tensor, Weights], Tensor]:
    def forward(tokens: Tensor, weights: Weights) -> Tensor:
        embedding = next(weights)
        hidden = embedding[tokens]
        for _ in range(blocks):
            inner = root_mean_square_norm(hidden, weights) @ next(weights).T
            attended = [
                attention(*parts)
                for parts in zip(*(part.chunk(heads, 2) for part in inner.chunk(3, 2)), strict=True)
            ]
            hidden = hidden + torch.cat(attended, 2) @ next(weights).T
            inner = root_mean_square_norm(hidden, weights) @ next(weights).T
            gate, expanded = inner.chunk(2, 2)
            hidden = hidden + (gate * torch.sigmoid(gate) * expanded) @ next(weights).T
        scores: Tensor = root_mean_square_norm(hidden, weights) @ embedding.T
        return scores

    return forward


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One head; element i and element i + width / 2 of a vector are a complex number."""
    length, width = queries.shape[1:]
    exponents = torch.arange(width // 2).double() / (width // 2)
    angles = torch.arange(length).double().outer(10_000.0**-exponents)
    turns = torch.polar(torch.ones_like(angles), angles)
    numbers = [torch.complex(*part.chunk(2, 2)) * turns for part in (queries, keys)]
    scores = (numbers[0] @ numbers[1].conj().transpose(1, 2)).real / width**0.5
    is_later = torch.ones(length, length).triu(1).bool()
    shares: Tensor = scores.masked_fill(is_later, -torch.inf).exp()
    return shares / shares.sum(2, keepdim=True) @ values


def root_mean_square_norm(hidden: Tensor, weights: Weights) -> Tensor:
    return hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * next(weights)


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
    "gpt-nano": gpt(3, 3),
    "gpt-micro": gpt(4, 4),
    "gpt-mini": gpt(6, 6),
}


def reference_losses(name: str, case: Case) -> list[float]:
    """Return the loss before each of the first updates, all on one batch."""
    weights = [
        weight.detach().double().requires_grad_(weight.requires_grad)
        for weight in build(name, case).parameters()
    ]
    trained = [weight for weight in weights if weight.requires_grad]
    velocities = [torch.zeros_like(weight) for weight in trained]
    inputs, labels = batch(case)
    labels = labels.flatten()
    losses = []
    for _ in range(case.losses):
        remaining = iter(weights)
        scores = FORWARD[name](inputs, remaining).flatten(0, -2)
        if next(remaining, None) is not None:
            raise ValueError(f"{name} has parameters that the reference does not use")
        right = scores[torch.arange(len(labels)), labels]
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
        case = {key: value for key, value in CASES[name]._asdict().items() if value is not None}
        curve = {**case, "losses": reference_losses(name, CASES[name])}
        path = Path(__file__).with_name(f"{name}.json")
        path.write_text(json.dumps(curve, indent=1) + "\n")


if __name__ == "__main__":
    main()
