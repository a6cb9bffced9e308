"""Weights or gradients in one contiguous tensor, so that collectives need no copies.

Shards that are updated separately need aligned buffers. Fused optimizers process the last elements
of a tensor, which do not fill a vector register, in a scalar loop that rounds differently. If
weights and shards are aligned to whole vectors, separate updates of the shards equal an update of
all weights, bit for bit. Shards also have equal sizes, as reduce-scatter and all-gather require.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from paceline.errors import UsageError

ALIGN_BYTES = 64
"""Size of a cache line and of the widest vector register."""


class FlatBuffer:
    """A tensor with space for one value per element of each weight, in order.

    Attributes:
        tensor: The whole buffer.
        offsets: Index of the first element of each weight.
        views: Per weight, a view with the shape and strides of the weight.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        *,
        shards: int | None = None,
        memory: Tensor | None = None,
        allocate: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        """Allocate a buffer of zeros, or use `memory`.

        With `shards`, weights are aligned and the buffer is padded to that many equal shards
        (`padded_bytes`).
        """
        self.weights = list(weights)
        check_same_kind(self.weights)
        first = self.weights[0] if self.weights else torch.empty(0)
        sizes = [weight.numel() for weight in self.weights]
        if shards is None:
            *self.offsets, elements = accumulate(sizes, initial=0)
        else:
            sizes_bytes = [weight.nbytes for weight in self.weights]
            element_bytes = first.element_size()
            self.offsets = [offset // element_bytes for offset in _aligned_offsets(sizes_bytes)]
            elements = padded_bytes(sizes_bytes, shards) // element_bytes
        if memory is None:
            memory = allocate(elements, dtype=first.dtype, device=first.device)
        self.tensor = memory
        self.views = self.views_of(memory)

    def views_of(self, tensor: Tensor) -> list[Tensor]:
        """View a tensor of the same layout, such as optimizer state, as one tensor per weight."""
        # Fused optimizers iterate in memory order, so views need the strides of the weights.
        return [
            tensor[offset:].as_strided(weight.shape, weight.stride())
            for offset, weight in zip(self.offsets, self.weights, strict=True)
        ]

    def flat(self, index: int) -> Tensor:
        """Return the values of one weight in one dimension, in memory order."""
        return self.tensor[self.offsets[index] :][: self.weights[index].numel()]

    def range(self, begin: int, end: int) -> Tensor:
        """Return the values of weights `begin` to `end` (exclusive)."""
        last = self.offsets[end] if end < len(self.offsets) else self.tensor.numel()
        return self.tensor[self.offsets[begin] : last]

    def hold_weights(self) -> None:
        """Move the weights into the buffer: each becomes a view of it."""
        for weight, view in zip(self.weights, self.views, strict=True):
            weight.data = view.copy_(weight.detach())

    def hold_gradients(self) -> None:
        """Make each `weight.grad` a view of the buffer; backward passes accumulate into it."""
        for weight, view in zip(self.weights, self.views, strict=True):
            weight.grad = view if weight.requires_grad else None


def padded_bytes(tensor_bytes: Sequence[int], shards: int) -> int:
    """Return the size of aligned tensors, padded to equal, aligned shards."""
    return _round_up(
        sum(_round_up(size, ALIGN_BYTES) for size in tensor_bytes), shards * ALIGN_BYTES
    )


def check_same_kind(weights: Sequence[nn.Parameter]) -> None:
    """Raise UsageError if weights differ in dtype or device and therefore cannot share a buffer."""
    kinds = {f"{weight.dtype} on {weight.device}" for weight in weights}
    if len(kinds) > 1:
        raise UsageError(
            f"the model's weights are {' and '.join(sorted(kinds))}, but this strategy requires"
            " one dtype and device: change the model, or use --strategy ddp"
        )


def _aligned_offsets(tensor_bytes: Sequence[int]) -> list[int]:
    offsets, end = [], 0
    for size in tensor_bytes:
        offsets.append(end)
        end = _round_up(end + size, ALIGN_BYTES)
    return offsets


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
