"""Strided CNN: a convolutional network that takes little time per image on a CPU."""

from __future__ import annotations

from torch import nn

from paceline.models.build import Width, image_shape, scaled

MIN_SIDE = 4
"""The first convolution leaves a third of the pixels per side, and pooling needs two."""


def strided_cnn(sample_shape: tuple[int, ...], classes: int, *, width: Width = 1) -> nn.Module:
    """A 5x5 convolution of stride 3 to 16 channels, 3x3 to 32, batch norm; 64 hidden units.

    The stride leaves the second convolution a ninth of the image, and channels in multiples of 16
    fill the vector registers, so it is faster than `lenet` with more weights.
    """
    channels, rows, columns = image_shape("strided_cnn", sample_shape, MIN_SIDE)
    first, second, hidden = (scaled(count, width) for count in (16, 32, 64))
    features = second * _output_side(rows) * _output_side(columns)
    return nn.Sequential(
        nn.Conv2d(channels, first, 5, stride=3, padding=2, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=1, bias=False),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(second),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def _output_side(side: int) -> int:
    """Return the side length after both convolutions and the pooling layer."""
    return ((side - 1) // 3 + 1) // 2
