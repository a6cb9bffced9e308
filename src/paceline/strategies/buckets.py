"""Buckets of gradients, which are reduced together.

A gradient that fills a bucket is a bucket of its own, and is reduced where autograd has put it.
Smaller ones are copied to the flat buffer of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.strategies.flat_buffer import FlatBuffer

MIB = 2**20
DEFAULT_MIB = 2.0
"""Smaller buckets cost more to start than to copy; larger ones start later."""
ONE_BUCKET_MIB = 1e6
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


def split(
    weights: Sequence[nn.Parameter], order: Sequence[int], first_mib: float, bucket_mib: float
) -> list[list[int]]:
    """Split weights, in the order of their gradients, into buckets in the order of their starts.

    A bucket ends when it is full; the first one is smaller, so that communication starts early. A
    gradient that fills a bucket does not wait for others.
    """
    if bucket_mib >= ONE_BUCKET_MIB:
        return [[*order]]
    first_mib = min(first_mib, bucket_mib)
    buckets: list[list[int]] = []
    collected: list[int] = []
    for index in order:
        full = MIB * (bucket_mib if buckets else first_mib)
        if weights[index].nbytes >= full:
            buckets.append([index])
            continue
        collected.append(index)
        if sum(weights[each].nbytes for each in collected) >= full:
            buckets.append(collected)
            collected = []
    return [*buckets, collected] if collected else buckets


def split_in_order(
    weights: Sequence[nn.Parameter], order: Sequence[int], first_mib: float, bucket_mib: float
) -> list[list[int]]:
    """Split as older versions did, whose checkpoints do not contain the buckets."""
    buckets: list[list[int]] = [[]]
    for index in order:
        buckets[-1].append(index)
        full = MIB * (bucket_mib if len(buckets) > 1 else first_mib)
        if sum(weights[each].nbytes for each in buckets[-1]) >= full:
            buckets.append([])
    return [bucket for bucket in buckets if bucket]
