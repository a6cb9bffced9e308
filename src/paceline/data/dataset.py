"""Dataset types: a training and a test split of tensors, with their normalization statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """Inputs and labels; the first dimension of both is the sample.

    Images are uint8 tensors of shape (samples, channels, height, width), which the input pipeline
    normalizes. Float tensors may have any shape and are not normalized.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def head(self, samples: int | None) -> Split:
        """Return the first `samples` samples as views; None returns the whole split."""
        return self if samples is None else self.part(slice(samples))

    def part(self, samples: slice) -> Split:
        """Return the given samples as views."""
        return Split(self.inputs[samples], self.labels[samples])


@dataclass(frozen=True, slots=True)
class Dataset:
    name: str
    train: Split
    test: Split
    classes: int
    mean: tuple[float, ...] = ()
    """Per channel, of the training images scaled to [0, 1]; empty if inputs are not normalized."""
    std: tuple[float, ...] = ()
    warnings: tuple[str, ...] = ()
    """Shown to the user once per run."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return tuple(self.train.inputs.shape[1:])


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Arguments of a dataset loader; RunConfig documents the fields."""

    folder: str | None = None
    train_samples: int | None = None
    test_samples: int | None = None
    resident_limit_bytes: int = 4096 << 20
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """Shape and size of a registered dataset, known without loading it (`outline` of a loader)."""

    sample_shape: tuple[int, int, int]
    """(channels, height, width)."""
    classes: int
    train_samples: int
    test_samples: int
    """The full size, or the default size where the loader generates any number of samples."""


Loader = Callable[[LoadRequest], Dataset]
"""Type of a registry entry. A loader may return more samples than the request asks for."""
