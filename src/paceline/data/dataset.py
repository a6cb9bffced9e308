"""What a dataset is to the rest of paceline: two splits of tensors, and how to normalise them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """Samples and labels, the first dimension counting samples.

    Images are uint8 tensors of (samples, channels, height, width) and are normalised on their way
    to the model; a float tensor of any shape is taken as it is.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def head(self, samples: int | None) -> Split:
        """The first `samples` of it, as views."""
        return self if samples is None else self.part(slice(samples))

    def part(self, chosen: slice) -> Split:
        """Some of it, as views."""
        return Split(self.inputs[chosen], self.labels[chosen])


@dataclass(frozen=True, slots=True)
class Dataset:
    name: str
    train: Split
    test: Split
    classes: int
    mean: tuple[float, ...] = ()
    """Per channel, of the training images scaled to 0..1; empty: not normalised."""
    std: tuple[float, ...] = ()
    warnings: tuple[str, ...] = ()
    """What the user should know about these files, once."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return tuple(self.train.inputs.shape[1:])


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a dataset's loader is asked for; the same fields as in RunConfig."""

    folder: str | None = None
    train_samples: int | None = None
    test_samples: int | None = None
    resident_limit_bytes: int = 4096 << 20
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What the loaders of registered sets know before anything is loaded, as `outline`."""

    sample_shape: tuple[int, int, int]
    """Channels, height, width."""
    classes: int
    train_samples: int
    test_samples: int
    """All there are, or as many as come where nobody asks for a number."""


Loader = Callable[[LoadRequest], Dataset]
"""The type of a registered dataset: it may return more samples than asked for."""
