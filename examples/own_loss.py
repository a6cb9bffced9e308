"""Your own loss: a regression. From the folder of this file:

paceline train --model own_loss:Regressor --data own_loss:surface --optimizer adam --nproc-per-node 2 --strategy ring
"""  # noqa: E501

import torch
from torch import Tensor, nn


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
        # Called as loss(outputs, targets) in training and in evaluation; a method works, too. It is
        # the mean over the samples it gets. Without a loss, this would be the cross-entropy.
        self.loss = nn.HuberLoss()

    def forward(self, inputs: Tensor) -> Tensor:
        heights: Tensor = self.layers(inputs)[:, 0]
        return heights


def surface(samples: int = 1500) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Points of a plane and the height of a surface above them. Targets may have any shape."""
    generator = torch.Generator().manual_seed(0)
    inputs = 4 * torch.rand(samples, 2, generator=generator) - 2
    heights = inputs[:, 0].sin() * inputs[:, 1].cos()
    train, test = slice(samples * 4 // 5), slice(samples * 4 // 5, None)
    return (inputs[train], heights[train]), (inputs[test], heights[test])
