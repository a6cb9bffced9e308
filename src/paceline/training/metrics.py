"""Metrics of the test set by name.

Classes have `accuracy`, tokens also `perplexity`, and bytes of text `bits_per_byte`. A user adds
others by --metrics: functions of outputs and targets. Every metric is a ratio of two sums, so that
batches of any size and workers with any share of the test set add up to the same value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.data.dataset import Dataset
from paceline.errors import ConfigError, UserCodeError, whole_error_line
from paceline.models.build import location_in
from paceline.records import NUMBER_MAX, is_number
from paceline.training import METRICS
from paceline.training.loss import CrossEntropy, Loss

RESERVED = ("loss", "test_loss", "test_accuracy", "train_loss")
"""Names of other figures in records and TensorBoard."""


def accuracy(outputs: Any, targets: Tensor) -> tuple[Tensor, int]:
    """Return how many predictions are correct, and how many there are."""
    if targets.dtype != torch.int64:
        raise ValueError(f"it needs class indices as targets, got {targets.dtype}")
    if not isinstance(outputs, Tensor) or outputs.shape[:-1] != targets.shape:
        expected = ", ".join(map(str, (*targets.shape, "classes")))
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"it needs outputs of shape ({expected}), got {got}")
    return (outputs.argmax(-1) == targets).sum(), targets.numel()


def perplexity(loss: float) -> float | None:
    """Return None if it is too large for the records."""
    return math.exp(loss) if loss < math.log(NUMBER_MAX) else None


def bits_per_byte(loss: float) -> float:
    return loss / math.log(2)


@dataclass(frozen=True, slots=True)
class Metric:
    """A function of the outputs and targets of a batch.

    It returns a sum and a count, or a number: the mean over the samples of the batch.
    """

    name: str
    path: str
    """As given to --metrics."""
    function: Callable[[Any, Tensor], Any]

    def sums(self, outputs: Any, targets: Tensor) -> tuple[Any, Any]:
        if outputs is None:
            raise UserCodeError(
                f"--metrics {self.path}: the model returns only its loss: return (outputs, loss)"
            )
        try:
            value = self.function(outputs, targets)
        except Exception as error:
            cause = f"{whole_error_line(error)}{location_in(self.function, error)}"
            raise UserCodeError(f"--metrics {self.path}: the metric failed: {cause}") from error
        is_pair = isinstance(value, tuple) and len(value) == 2
        for one in value if is_pair else (value,):
            if not _is_one_number(one):
                shape = f" of shape {tuple(one.shape)}" if isinstance(one, Tensor) else ""
                raise UserCodeError(
                    f"--metrics {self.path}: the metric must return a number or (sum, count),"
                    f" got {type(one).__name__}{shape}"
                )
        return value if is_pair else (value * len(targets), len(targets))


def _is_one_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return not value.dim() and not value.is_complex()
    return isinstance(value, int | float)


class Metrics:
    """The metrics of a run."""

    def __init__(self, config: RunConfig, dataset: Dataset, loss: Loss) -> None:
        """Raise ConfigError for names that are taken or that the data does not have."""
        self._names = _default_names(dataset, loss)
        self._own: list[Metric] = []
        problems = []
        for path in config.metrics:
            METRICS.check(path)
            name = path.rpartition(":")[2]
            if path in METRICS:
                if path == "bits_per_byte" and not dataset.is_text:
                    problems.append(f"--metrics {path}: applies to text, not to {dataset.name}")
                if name not in self._names:
                    self._names.append(name)
            elif name in (*METRICS.names(), *RESERVED, *self._names):
                problems.append(f"--metrics {path}: the name {name} is taken; rename the function")
            else:
                self._names.append(name)
                self._own.append(Metric(name, path, METRICS.load(path)))
        if config.target_accuracy is not None and "accuracy" not in self._names:
            problems.append(
                "--target-accuracy: the model has its own loss, so add --metrics accuracy or use"
                " --target-loss"
            )
        if problems:
            raise ConfigError(problems)
        self._summed = list(self._own)
        if "accuracy" in self._names:
            self._summed.insert(0, Metric("accuracy", "accuracy", accuracy))

    @property
    def size(self) -> int:
        """The number of sums."""
        return len(self._summed) + len(self._own)

    def sums(self, outputs: Any, targets: Tensor) -> list[Any]:
        """Return the sums of a batch: numerators, then the denominators that are not known."""
        if isinstance(outputs, Tensor) and outputs.dtype in (torch.bfloat16, torch.float16):
            outputs = outputs.float()
        pairs = [metric.sums(outputs, targets) for metric in self._summed]
        known = len(self._summed) - len(self._own)
        return [total for total, _ in pairs] + [count for _, count in pairs[known:]]

    def values(
        self, loss: float, sums: Sequence[float], predictions: float
    ) -> dict[str, float | None]:
        """Return the metrics of the test set by name; None if one is not a number for the records.

        `sums` are those of all batches; `predictions` is the denominator of the accuracy.
        """
        values = {"perplexity": perplexity(loss), "bits_per_byte": bits_per_byte(loss)}
        totals, counts = sums[: len(self._summed)], sums[len(self._summed) :]
        if len(totals) > len(counts):
            counts = [predictions, *counts]
        for metric, total, count in zip(self._summed, totals, counts, strict=True):
            values[metric.name] = total / count if count else None
        found = {name: values[name] for name in self._names}
        return {name: value if is_number(value) else None for name, value in found.items()}


def _default_names(dataset: Dataset, loss: Loss) -> list[str]:
    """Metrics without --metrics: a loss of the model may not be a cross-entropy of classes."""
    if not isinstance(loss, CrossEntropy):
        return []
    names = ["accuracy"]
    if dataset.has_tokens:
        names.append("perplexity")
    if dataset.is_text:
        names.append("bits_per_byte")
    return names
