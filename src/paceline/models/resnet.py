"""ResNet for small images: a 3x3 stem without max-pooling."""

from __future__ import annotations

from torch import Tensor, nn

from paceline.models.build import Width, image_shape, scaled

STAGE_CHANNELS = (64, 128, 256, 512)
"""Each stage except the first starts by halving the image."""

MIN_SIDE = 9
"""Leaves the last stage 2x2 pixels, so that batch norm works even with a batch of one."""


def resnet18(sample_shape: tuple[int, ...], classes: int, *, width: Width = 1) -> nn.Module:
    return _resnet("resnet18", (2, 2, 2, 2), sample_shape, classes, width)


def resnet34(sample_shape: tuple[int, ...], classes: int, *, width: Width = 1) -> nn.Module:
    return _resnet("resnet34", (3, 4, 6, 3), sample_shape, classes, width)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: identity, or a 1x1 convolution where shapes differ."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )
        self.activation = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        summed: Tensor = self.activation(self.residual(images) + self.shortcut(images))
        return summed


def _resnet(
    name: str,
    stage_blocks: tuple[int, ...],
    sample_shape: tuple[int, ...],
    classes: int,
    width: float,
) -> nn.Module:
    channels, _, _ = image_shape(name, sample_shape, MIN_SIDE)
    stages = [scaled(count, width) for count in STAGE_CHANNELS]
    layers: list[nn.Module] = [
        nn.Conv2d(channels, stages[0], 3, padding=1, bias=False),
        nn.BatchNorm2d(stages[0]),
        nn.ReLU(),
    ]
    channels = stages[0]
    for stage, (blocks, stage_channels) in enumerate(zip(stage_blocks, stages, strict=True)):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(ResidualBlock(channels, stage_channels, stride))
            channels = stage_channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            # PyTorch's default shrinks activations layer by layer; this preserves their variance.
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
