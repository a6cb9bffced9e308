"""Models of a few hundred parameters, so that recorded checkpoints stay small."""

from __future__ import annotations

from torch import nn


def tiny(sample_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A convolution with batch norm and a linear layer: weights, biases and buffers."""
    return nn.Sequential(
        nn.Conv2d(sample_shape[0], 4, kernel_size=5, stride=4),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, classes),
    )
