"""CNN: a convolutional network sized for MNIST."""

from __future__ import annotations

from torch import nn

from paceline.models.build import image_shape

MIN_SIDE = 6
"""The convolutions remove four pixels, and pooling needs two."""


def cnn(sample_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 3x3 convolutions to 32 and 64 channels, one max-pooling layer, 128 hidden units."""
    channels, height, width = image_shape("cnn", sample_shape, MIN_SIDE)
    features = 64 * ((height - 4) // 2) * ((width - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(features, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )
