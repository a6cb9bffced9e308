"""A small user-defined model with batch norm."""

from __future__ import annotations

from torch import Tensor, nn


class Normed(nn.Module):
    def __init__(self, sample_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(sample_shape[0], 6, 5, stride=3),
            nn.BatchNorm2d(6),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(6 * 10 * 10, classes),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs
