"""CNN: a convolutional network sized for MNIST."""

from __future__ import annotations

from torch import nn

from paceline.models.build import Width, image_shape, scaled

MIN_SIDE = 6
"""The convolutions remove four pixels, and pooling needs two."""


def cnn(sample_shape: tuple[int, ...], classes: int, *, width: Width = 1) -> nn.Module:
    """Two 3x3 convolutions to 32 and 64 channels, one max-pooling layer, 128 hidden units."""
    channels, rows, columns = image_shape("cnn", sample_shape, MIN_SIDE)
    first, second, hidden = (scaled(count, width) for count in (32, 64, 128))
    features = second * ((rows - 4) // 2) * ((columns - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, first, 3),
        nn.ReLU(),
        nn.Conv2d(first, second, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )
