"""The loss of classification, and the number of correct predictions.

Logits have the classes in their last dimension and otherwise the shape of the targets: one
prediction per sample, or one per position of a sample.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from paceline.errors import UserCodeError


def cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Return the cross-entropy of all predictions, as a mean or a sum."""
    if logits.shape[:-1] != targets.shape:
        expected = ", ".join(map(str, (*targets.shape, "classes")))
        raise UserCodeError(
            f"--model: outputs of shape ({expected}) are needed for these targets,"
            f" got {tuple(logits.shape)}"
        )
    if targets.dim() > 1:
        logits, targets = logits.flatten(0, -2), targets.flatten()
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction=reduction)


def count_correct(logits: Tensor, targets: Tensor) -> Tensor:
    """Return how many predictions are correct, out of `targets.numel()`."""
    return (logits.argmax(-1) == targets).sum()
