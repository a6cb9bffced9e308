"""MLP: a multilayer perceptron."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

HIDDEN_WIDTHS = (1024, 512, 256, 128, 64, 32)


def mlp(sample_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Six hidden layers, each followed by a ReLU, over the flattened sample."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in pairwise((math.prod(sample_shape), *HIDDEN_WIDTHS)):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    layers.append(nn.Linear(HIDDEN_WIDTHS[-1], classes))
    return nn.Sequential(*layers)
