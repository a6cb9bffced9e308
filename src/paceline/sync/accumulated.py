"""Gradients of a small model, which the backward pass adds up where another worker reads them.

Copying gradients one by one, and summing them one by one, would take longer than a small model's
bytes are worth. So every gradient is a view of the worker's own part of the shared memory, nothing
is handed over, and one addition a worker sums them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.sync.aligned import AlignedMemory


class AccumulatedGradients:
    """Of a model that the first worker updates alone; `Deposits` are those of larger ones."""

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        memories: Sequence[AlignedMemory],
        place: int,
    ) -> None:
        """`memories` are all workers', this one's at `place`."""
        self._is_read = place > 0
        self._own = memories[place].tensor
        self._others = [memory.tensor for number, memory in enumerate(memories) if number != place]
        self._views = [
            (weight, view)
            for weight, view in zip(weights, memories[place].views, strict=True)
            if weight.requires_grad
        ]
        self._gradient_bytes = sum(view.nbytes for _, view in self._views)
        for weight, view in self._views:
            weight.grad = view

    def give(self) -> int:
        """See that the gradients are where the first worker reads them; how many bytes it reads.

        They are not where somebody has put others in their place, or none.
        """
        for weight, view in self._views:
            if weight.grad is not view:
                if weight.grad is None:
                    view.zero_()
                else:
                    view.copy_(weight.grad)
                weight.grad = view
        return self._gradient_bytes if self._is_read else 0

    def sum_up(self) -> int:
        """Add the others' gradients to this worker's own; how many bytes of theirs were read."""
        for other in self._others:
            self._own.add_(other)
        return len(self._others) * self._gradient_bytes

    def forget(self) -> None:
        """The sums go with the gradients."""

    def clear(self) -> None:
        """Begin the next gradients with zeros, once nobody reads these any more."""
        self._own.zero_()

    def release(self) -> None:
        """Leave the weights without gradients, as they were."""
        for weight, _ in self._views:
            weight.grad = None
