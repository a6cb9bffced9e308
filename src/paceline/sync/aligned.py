"""One tensor with room for something beside each weight, cut into chunks that suit optimisers.

The vector loops of fused optimisers leave the last elements of a tensor to a scalar loop, which
rounds differently. Here weights begin, and chunks end, at multiples of a whole vector; so an
element is treated alike in a worker's chunk and in the weight as a whole, and the update of a chunk
is bit for bit that part of the update of everything. Chunks of equal size are also what the
libraries' own collectives want.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

UNIT_BYTES = 64
"""A cache line, and the longest vector of today's processors."""


class AlignedMemory:
    """`tensor` is all of it; `views[i]` has the shape and strides of weight `i`.

    The memory may be given, of `padded_bytes`; else it is new. Either way it must begin as zeros.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], workers: int, memory: Tensor | None = None
    ) -> None:
        first = weights[0]
        sizes = [weight.nbytes for weight in weights]
        element_bytes = first.element_size()
        self.offsets = [offset // element_bytes for offset in offsets_bytes(sizes)]
        """The first element of each weight."""
        if memory is None:
            elements = padded_bytes(sizes, workers) // element_bytes
            memory = torch.zeros(elements, dtype=first.dtype, device=first.device)
        self.tensor = memory
        # Strides are kept, since fused optimisers walk weights and gradients in memory order.
        self.views = [
            self.tensor[offset:].as_strided(weight.shape, weight.stride())
            for offset, weight in zip(self.offsets, weights, strict=True)
        ]


def offsets_bytes(tensor_bytes: Sequence[int]) -> list[int]:
    """Where each of several tensors begins."""
    offsets, end = [], 0
    for size in tensor_bytes:
        offsets.append(end)
        end = _round_up(end + size, UNIT_BYTES)
    return offsets


def padded_bytes(tensor_bytes: Sequence[int], workers: int) -> int:
    """What all of them take, so that it can be cut into a chunk of whole units for each worker."""
    return _round_up(
        sum(_round_up(size, UNIT_BYTES) for size in tensor_bytes), workers * UNIT_BYTES
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
