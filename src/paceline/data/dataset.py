"""Dataset types: a training and a test split of tensors, and the transform of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.data.image_transforms import ImageTransform


@dataclass(frozen=True, slots=True)
class Split:
    """Inputs and targets; the first dimension of both is the sample.

    Targets are class indices of any integer dtype: one per sample, or one per position of a sample.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def head(self, samples: int | None) -> Split:
        """Return the first `samples` samples as views; None returns the whole split."""
        return self if samples is None else self.part(slice(samples))

    def part(self, samples: slice) -> Split:
        """Return the given samples as views."""
        return Split(self.inputs[samples], self.targets[samples])


@dataclass(frozen=True, slots=True)
class Dataset:
    name: str
    train: Split
    test: Split
    classes: int
    transform: ImageTransform | None = None
    """What the inputs are: images to normalize, or, if None, values that the model takes as is."""
    warnings: tuple[str, ...] = ()
    """Shown to the user once per run."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return tuple(self.train.inputs.shape[1:])

    @property
    def has_tokens(self) -> bool:
        """Whether inputs are integers without a transform: indices for an embedding."""
        return self.transform is None and not self.train.inputs.is_floating_point()


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

    sample_shape: tuple[int, ...]
    """(channels, height, width) of images."""
    classes: int
    train_samples: int
    test_samples: int
    """The full size, or the default size where the loader generates any number of samples."""


Loader = Callable[[LoadRequest], Dataset]
"""Type of a registry entry. A loader may return more samples than the request asks for."""
