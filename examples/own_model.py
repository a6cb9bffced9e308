"""Your own model and data; paceline does the rest. From the folder of this file:

paceline train --model own_model:Wide --data own_model:rings --nproc-per-node 2 --strategy ring
"""

import torch
from torch import Tensor, nn


class Wide(nn.Module):
    """Any module will do; these arguments are given by name, and only if it has them."""

    def __init__(self, sample_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        (features,) = sample_shape
        self.layers = nn.Sequential(nn.Linear(features, 256), nn.ReLU(), nn.Linear(256, classes))

    def forward(self, inputs: Tensor) -> Tensor:
        # One row of scores for each sample; the loss is their cross-entropy with the labels.
        scores: Tensor = self.layers(inputs)
        return scores


def rings(
    train_samples: int = 1200, test_samples: int = 300
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Points on three rings around one another; which ring is the label.

    Every worker calls this, and all must get the same: hence the seed. Float inputs are taken as
    they are; images as bytes would be normalised, and could be augmented.
    """
    generator = torch.Generator().manual_seed(0)
    samples = train_samples + test_samples
    labels = torch.arange(samples) % 3
    radius = labels + 1 + 0.1 * torch.randn(samples, generator=generator)
    angle = 6.2832 * torch.rand(samples, generator=generator)
    inputs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    train, test = slice(train_samples), slice(train_samples, None)
    return (inputs[train], labels[train]), (inputs[test], labels[test])
