"""VGG for 32x32 images: batch norm, and one linear layer instead of three.

The convolutions keep their bias, which batch norm makes redundant, because the network of the
reference measurements has it: the number and sizes of gradient tensors determine the communication
cost.
"""

from __future__ import annotations

from torch import nn

from paceline.models.build import Width, image_shape, scaled

STAGE_CHANNELS = (64, 128, 256, 512, 512)
"""Each stage ends with a pooling layer that halves the image."""

REDUCTION = 2 ** len(STAGE_CHANNELS)


def vgg11(sample_shape: tuple[int, ...], classes: int, *, width: Width = 1) -> nn.Module:
    return _vgg("vgg11", (1, 1, 2, 2, 2), sample_shape, classes, width)


def vgg13(sample_shape: tuple[int, ...], classes: int, *, width: Width = 1) -> nn.Module:
    return _vgg("vgg13", (2, 2, 2, 2, 2), sample_shape, classes, width)


def vgg16(sample_shape: tuple[int, ...], classes: int, *, width: Width = 1) -> nn.Module:
    return _vgg("vgg16", (2, 2, 3, 3, 3), sample_shape, classes, width)


def vgg19(sample_shape: tuple[int, ...], classes: int, *, width: Width = 1) -> nn.Module:
    return _vgg("vgg19", (2, 2, 4, 4, 4), sample_shape, classes, width)


def _vgg(
    name: str,
    stage_convolutions: tuple[int, ...],
    sample_shape: tuple[int, ...],
    classes: int,
    width: float,
) -> nn.Module:
    """Five stages, average pooling over the remaining pixels, and one linear layer.

    Sides are zero-padded (zero is the mean of normalized images) to a multiple of REDUCTION: 28x28
    becomes 32x32, so that all five stages see the whole image.
    """
    channels, rows, columns = image_shape(name, sample_shape)
    layers: list[nn.Module] = []
    padding = (*_padding(columns), *_padding(rows))
    if any(padding):
        layers.append(nn.ZeroPad2d(padding))
    stages = [scaled(count, width) for count in STAGE_CHANNELS]
    for convolutions, stage_channels in zip(stage_convolutions, stages, strict=True):
        for _ in range(convolutions):
            layers += [
                nn.Conv2d(channels, stage_channels, 3, padding=1),
                nn.BatchNorm2d(stage_channels),
                nn.ReLU(),
            ]
            channels = stage_channels
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


def _padding(side: int) -> tuple[int, int]:
    """Return the padding before and after a side that makes it a multiple of REDUCTION."""
    missing = -side % REDUCTION
    return missing // 2, missing - missing // 2
