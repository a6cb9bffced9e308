"""Error feedback: what a lossy codec left out of one step is added to the next.

Without it a small entry that rounds to nothing is lost at every step, and training settles in the
wrong place. With it the entry waits until it has grown large enough to be sent: the sum of all that
was sent never differs from the sum of all the gradients by more than what is pending now.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paceline.errors import CheckpointError


class ErrorFeedback:
    """What is still to be sent, by the gradient's key."""

    def __init__(self) -> None:
        self._pending: dict[str, Tensor] = {}

    def add(self, key: str, gradient: Tensor) -> Tensor:
        """All that is to be sent now; the codec subtracts in place what it sends.

        The buffer is this object's own, and the gradient stays as it was.
        """
        pending = self._pending.get(key)
        if pending is None:
            pending = gradient.clone()
        elif pending.shape != gradient.shape or pending.dtype != gradient.dtype:
            raise CheckpointError(
                f"the codec remembers {key} as {pending.numel()} x {pending.dtype}, not as"
                f" {gradient.numel()} x {gradient.dtype}: resume with the original run's buckets"
            )
        else:
            # A non-finite gradient shows in its own step; kept, it would spoil all later ones.
            pending = pending.to(gradient.device).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            pending.add_(gradient)
        self._pending[key] = pending
        return pending

    def rescale(self, factor: float) -> None:
        """Multiply all that is pending."""
        for pending in self._pending.values():
            pending.mul_(factor)

    def state(self) -> dict[str, Tensor]:
        return copied(self._pending)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._pending = copied(state)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, so that a checkpoint being written and the next step do not share memory."""
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}
