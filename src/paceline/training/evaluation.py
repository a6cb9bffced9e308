"""Loss and accuracy on the test set."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.communicator import Communicator


def evaluate(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    together: Communicator | None = None,
) -> tuple[float, float]:
    """Mean cross-entropy and share of right answers; the model is left in the mode it was in.

    With `together`, each worker brings its part of the test set, and all get the whole's figures.
    """
    was_training = model.training
    model.eval()
    loss_sum: Tensor | float = 0.0
    right: Tensor | int = 0
    count = 0
    with torch.inference_mode():
        for inputs, labels in batches:
            logits = forward(inputs).float()
            loss_sum = loss_sum + F.cross_entropy(logits, labels, reduction="sum").double()
            right = right + (logits.argmax(1) == labels).sum()
            count += len(labels)
    model.train(was_training)
    totals = torch.tensor([float(loss_sum), float(right), count], dtype=torch.float64)
    if together is not None and together.world_size > 1:
        together.all_reduce(totals, "metrics").wait()
    return float(totals[0] / totals[2]), float(totals[1] / totals[2])
