"""LeNet: a small convolutional network in the style of LeNet-5."""

from __future__ import annotations

from torch import nn

from paceline.models.build import image_shape

MIN_SIDE = 16
"""Each stage removes four pixels and halves the rest; 15 pixels would leave none."""


def lenet(sample_shape: tuple[int, ...], classes: int) -> nn.Module:
    """5x5 convolutions to 6 and 16 channels, each with ReLU and max-pooling; 64 hidden units."""
    channels, height, width = image_shape("lenet", sample_shape, MIN_SIDE)
    features = 16 * _output_side(height) * _output_side(width)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(features, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


def _output_side(side: int) -> int:
    """Return the side length after both convolutions and pooling layers."""
    return ((side - 4) // 2 - 4) // 2
