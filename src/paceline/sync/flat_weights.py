"""Weights one after the other in a single tensor, so that they travel without being copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.sync.flat import check_alike


class FlatWeights:
    """Owns the memory of some weights; each of them is a view of it.

    Laid out as `FlatGradients` lays out the gradients: the elements of both are in the same order.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = list(weights)
        check_alike(self._weights)
        self._sizes = [weight.numel() for weight in self._weights]
        first = self._weights[0] if self._weights else torch.empty(0)
        self.tensor = torch.empty(sum(self._sizes), dtype=first.dtype, device=first.device)
        for weight, view in zip(self._weights, self.views(self.tensor), strict=True):
            view.copy_(weight.detach())
            weight.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """A tensor of the same layout, such as an optimiser's state, in the weights' shapes."""
        return [
            part.as_strided(weight.shape, weight.stride())
            for weight, part in zip(self._weights, flat.split(self._sizes), strict=True)
        ]
