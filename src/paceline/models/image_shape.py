"""What a convolutional model asks of the shape of its samples."""

from __future__ import annotations

from paceline.errors import ConfigError


def image_shape(
    model: str, sample_shape: tuple[int, ...], smallest_side: int = 1
) -> tuple[int, int, int]:
    """`sample_shape` as channels, height and width; ConfigError if it is no image or too small."""
    if len(sample_shape) == 3:
        channels, height, width = sample_shape
        if channels >= 1 and min(height, width) >= smallest_side:
            return channels, height, width
    raise ConfigError(
        [
            f"--model: {model} needs images (channels, height, width) of at least "
            f"{smallest_side}x{smallest_side} pixels, but samples have the shape {sample_shape}; "
            "softmax and mlp take any shape"
        ]
    )
