"""Softmax regression."""

from __future__ import annotations

import math

from torch import nn


def softmax(sample_shape: tuple[int, ...], classes: int) -> nn.Module:
    """One linear layer over the flattened sample; the softmax itself is part of the loss."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(sample_shape), classes))
