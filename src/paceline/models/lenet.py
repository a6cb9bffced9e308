"""A small convolutional network in the manner of LeNet."""

from __future__ import annotations

from torch import nn

from paceline.models.build import image_shape

SMALLEST_SIDE = 16
"""Each half takes four pixels off and halves the rest; from 15 pixels nothing would be left."""


def lenet(sample_shape: tuple[int, ...], classes: int) -> nn.Module:
    """5x5 convolutions to 6 and 16 channels, each with ReLU and max-pooling; 64 hidden units."""
    channels, height, width = image_shape("lenet", sample_shape, SMALLEST_SIDE)
    features = 16 * _side_after(height) * _side_after(width)
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


def _side_after(side: int) -> int:
    """What both convolutions and poolings leave of a side."""
    return ((side - 4) // 2 - 4) // 2
