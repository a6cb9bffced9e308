"""Gradients one after the other in a single tensor, so that they travel without being copied."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator
from paceline.errors import UsageError


class FlatGradients:
    """Owns the memory of the gradients of some weights; `weight.grad` is a view of it.

    The backward pass adds into the views, an all-reduce works on the whole, and the optimiser reads
    the views again: nothing is gathered or scattered.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], communicator: Communicator | None = None
    ) -> None:
        """Collective over the communicator that sums them; none where something else is sent."""
        self.weights = list(weights)
        check_alike(self.weights)
        self.shapes = [tuple(weight.shape) for weight in self.weights]
        sizes = [weight.numel() for weight in self.weights]
        self._offsets = [0, *accumulate(sizes)]
        first = self.weights[0] if self.weights else torch.empty(0)
        zeros = communicator.zeros if communicator is not None else torch.zeros
        self.tensor = zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.parts = self.tensor.split(sizes)
        """Each weight's gradient, flat and in the order of its memory."""
        for weight, part in zip(self.weights, self.parts, strict=True):
            # The strides of the weight, since fused optimisers walk both in memory order.
            weight.grad = part.as_strided(weight.shape, weight.stride())

    def part(self, begin: int, end: int) -> Tensor:
        """Where the gradients of weights `begin` to `end` lie."""
        return self.tensor[self._offsets[begin] : self._offsets[end]]


def check_alike(weights: Sequence[nn.Parameter]) -> None:
    """Refuse weights that cannot lie in one tensor."""
    kinds = {f"{weight.dtype} on {weight.device}" for weight in weights}
    if len(kinds) > 1:
        raise UsageError(
            f"the model's weights are {' and '.join(sorted(kinds))}, and this strategy needs all of"
            " one kind: change the model, or choose --strategy ddp"
        )
