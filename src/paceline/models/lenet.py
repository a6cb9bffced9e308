"""LeNet: a small convolutional network in the style of LeNet-5."""

from __future__ import annotations

from torch import nn

from paceline.models.build import Width, image_shape, scaled

MIN_SIDE = 16
"""Each stage removes four pixels and halves the rest; 15 pixels would leave none."""


def lenet(sample_shape: tuple[int, ...], classes: int, *, width: Width = 1) -> nn.Module:
    """5x5 convolutions to 6 and 16 channels, each with ReLU and max-pooling; 64 hidden units."""
    channels, rows, columns = image_shape("lenet", sample_shape, MIN_SIDE)
    first, second, hidden = (scaled(count, width) for count in (6, 16, 64))
    # ReLU after pooling gives the same values and gradients, for a quarter of the elements.
    features = second * _output_side(rows) * _output_side(columns)
    return nn.Sequential(
        nn.Conv2d(channels, first, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(first, second, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def _output_side(side: int) -> int:
    """Return the side length after both convolutions and pooling layers."""
    return ((side - 4) // 2 - 4) // 2
