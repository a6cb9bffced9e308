"""MLP: a multilayer perceptron."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from paceline.models.build import Width, scaled

HIDDEN_UNITS = (1024, 512, 256, 128, 64, 32)


def mlp(sample_shape: tuple[int, ...], classes: int, *, width: Width = 1) -> nn.Module:
    """Six hidden layers, each followed by a ReLU, over the flattened sample."""
    hidden = [scaled(units, width) for units in HIDDEN_UNITS]
    layers: list[nn.Module] = [nn.Flatten()]
    for units_in, units_out in pairwise((math.prod(sample_shape), *hidden)):
        layers += [nn.Linear(units_in, units_out), nn.ReLU()]
    layers.append(nn.Linear(hidden[-1], classes))
    return nn.Sequential(*layers)
