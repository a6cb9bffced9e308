"""Error feedback: the compression error of one step is added to the gradient of the next.

Without it, a small entry that rounds to zero is lost in every step, and training converges to a
wrong solution. With it, the entry accumulates until it is large enough to be sent: the sum of all
sent values differs from the sum of all gradients only by the current residual.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paceline.errors import CheckpointError


class ErrorFeedback:
    """Residuals that are still to be sent, by gradient key."""

    def __init__(self) -> None:
        self._pending: dict[str, Tensor] = {}

    def add(self, key: str, gradient: Tensor) -> Tensor:
        """Add a gradient to its residual; the codec subtracts in place what it sends.

        The returned buffer belongs to this object, and the gradient is not modified.
        """
        pending = self._pending.get(key)
        if pending is None:
            pending = gradient.clone()
        elif pending.shape != gradient.shape or pending.dtype != gradient.dtype:
            raise CheckpointError(
                f"codec state of {key} has {pending.numel()} elements of {pending.dtype}, expected"
                f" {gradient.numel()} of {gradient.dtype}: resume with the original bucket size"
            )
        else:
            # A non-finite gradient must affect only its own step, not all later ones.
            pending = pending.to(gradient.device).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            pending.add_(gradient)
        self._pending[key] = pending
        return pending

    def rescale(self, factor: float) -> None:
        """Multiply all residuals."""
        for pending in self._pending.values():
            pending.mul_(factor)

    def state(self) -> dict[str, Tensor]:
        return clone_all(self._pending)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._pending = clone_all(state)


def clone_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Clone tensors, so that a checkpoint being written does not change in the next step."""
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}
