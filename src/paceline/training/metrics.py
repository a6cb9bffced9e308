"""Metrics of the test set by name, which follow from the mean loss and the accuracy.

Images and floats have `accuracy`. Tokens also have `perplexity`, and bytes of text `bits_per_byte`.
"""

from __future__ import annotations

import math

from paceline.data.dataset import Dataset, TokenTransform
from paceline.records import NUMBER_MAX


def metrics_of(dataset: Dataset, loss: float, accuracy: float) -> dict[str, float | None]:
    """Return the metrics that a dataset has; None if one is too large for the records.

    `loss` is the mean cross-entropy of all predictions in nats.
    """
    metrics: dict[str, float | None] = {"accuracy": accuracy}
    if isinstance(dataset.transform, TokenTransform):
        metrics["perplexity"] = _perplexity(loss)
        if dataset.transform.is_bytes:
            metrics["bits_per_byte"] = loss / math.log(2)
    return metrics


def _perplexity(loss: float) -> float | None:
    return math.exp(loss) if loss < math.log(NUMBER_MAX) else None
