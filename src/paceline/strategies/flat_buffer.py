"""One tensor with room for something beside each weight, cut into chunks that suit optimizers.

The vector loops of fused optimizers leave the last elements of a tensor to a scalar loop, which
rounds differently. Here weights begin, and chunks end, at multiples of a whole vector; so an
element is treated alike in a worker's chunk and in the weight as a whole, and the update of a chunk
is bit for bit that part of the update of everything. Chunks of equal size are also what the
libraries' own collectives want.

Gradients one after the other in a single tensor, so that they travel without being copied.

Weights one after the other in a single tensor, so that they travel without being copied."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator
from paceline.errors import UsageError

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
        # Strides are kept, since fused optimizers walk weights and gradients in memory order.
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


class FlatGradients:
    """Owns the memory of the gradients of some weights; `weight.grad` is a view of it.

    The backward pass adds into the views, an all-reduce works on the whole, and the optimizer reads
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
            # The strides of the weight, since fused optimizers walk both in memory order.
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
        """A tensor of the same layout, such as an optimizer's state, in the weights' shapes."""
        return [
            part.as_strided(weight.shape, weight.stride())
            for weight, part in zip(self._weights, flat.split(self._sizes), strict=True)
        ]
