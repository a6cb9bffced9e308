"""Buckets of gradients, which are reduced together; bucket_layout.py assigns gradients to them.

A gradient that fills a bucket is a bucket of its own, and is reduced where autograd has put it.
Smaller ones are copied to the flat buffer of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.strategies.flat_buffer import FlatBuffer

UNSHARED = 2
"""References to the memory of a tensor that no other tensor uses: its own and the caller's."""


class Bucket:
    """Gradients that are reduced together."""

    def __init__(self, key: str, weights: Sequence[nn.Parameter], members: Sequence[int]) -> None:
        """`members` are the indices of the bucket's weights."""
        self.key, self.members = key, members
        self._weights = {index: weights[index] for index in members}
        self.shapes = [tuple(weight.shape) for weight in self._weights.values()]
        self.bytes = sum(weight.nbytes for weight in self._weights.values())
        self._buffer = FlatBuffer([*self._weights.values()]) if len(members) > 1 else None
        views = self._buffer.views if self._buffer else []
        self._views = dict(zip(members, views, strict=False))
        self.missing = set(members)
        """Weights whose gradients are not ready yet in this step."""

    def add(self, index: int) -> None:
        """Take the gradient of a weight, which is ready."""
        self.missing.remove(index)
        weight = self._weights[index]
        if self._buffer is None:
            own_gradient(weight)
        else:
            weight.grad = _filled(self._views[index], weight.grad)

    def add_missing(self) -> None:
        """Take gradients of zero for the weights that are unused in this step."""
        for index in tuple(self.missing):
            self.add(index)

    def gradient(self) -> Tensor:
        """Return all gradients as one flat tensor, which is reduced in place."""
        if self._buffer is not None:
            return self._buffer.tensor
        [weight] = self._weights.values()
        assert weight.grad is not None
        return weight.grad.as_strided((weight.numel(),), (1,))


def own_gradient(weight: nn.Parameter) -> None:
    """Give a weight a dense gradient in memory that no other tensor uses.

    Autograd shares memory between gradients if one is a view of what another one also receives.
    """
    gradient = weight.grad
    if (
        gradient is None
        or gradient.layout is not torch.strided
        or gradient.stride() != weight.stride()
        or torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > UNSHARED
    ):
        weight.grad = _filled(torch.empty_like(weight), gradient)


def _filled(target: Tensor, gradient: Tensor | None) -> Tensor:
    """Set a tensor to a gradient, or to zero if there is none."""
    if gradient is None:
        return target.zero_()
    return target.copy_(gradient if gradient.layout is torch.strided else gradient.to_dense())
