"""Dataset types: a training and a test split of tensors, and what their inputs are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data.image_transforms import ImageTransform


@dataclass(frozen=True, slots=True)
class Split:
    """Inputs and targets; the first dimension of both is the sample.

    Targets are class indices of any integer dtype, one per sample or one per position of a sample,
    or whatever the loss of the user's model takes.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def target_dtype(self) -> torch.dtype:
        """Targets of a batch: int64 for integers, float32 for floats, truth values as they are."""
        if self.targets.is_floating_point():
            return torch.float32
        return torch.bool if self.targets.dtype == torch.bool else torch.int64

    def head(self, samples: int | None) -> Split:
        """Return the first `samples` samples as views; None returns the whole split."""
        return self if samples is None else self.part(slice(samples))

    def part(self, samples: slice) -> Split:
        """Return the given samples as views."""
        return Split(self.inputs[samples], self.targets[samples])


@dataclass(frozen=True, slots=True)
class TokenTransform:
    """Inputs are tokens of any integer dtype, which the model gets as int64."""

    is_bytes: bool = False
    """Whether each token is a byte of text."""


Transform = ImageTransform | TokenTransform


@dataclass(frozen=True, slots=True)
class Dataset:
    name: str
    train: Split
    test: Split
    classes: int
    """For tokens, the size of the vocabulary; for targets that are not classes, their values per
    sample."""
    transform: Transform | None = None
    """What the inputs are: images, tokens or, if None, floats that the model takes as is."""
    warnings: tuple[str, ...] = ()
    """Shown to the user once per run."""
    target_problem: str = ""
    """Why the targets are not class indices, which the cross-entropy needs; empty if they are."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return tuple(self.train.inputs.shape[1:])

    @property
    def has_tokens(self) -> bool:
        return isinstance(self.transform, TokenTransform)

    @property
    def is_text(self) -> bool:
        """Whether each token is a byte of text."""
        return isinstance(self.transform, TokenTransform) and self.transform.is_bytes


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Arguments of a dataset loader; RunConfig documents the fields."""

    folder: str | None = None
    train_samples: int | None = None
    test_samples: int | None = None
    resident_limit_bytes: int = 4096 << 20
    seed: int = 0
    path: str = ""
    """Of `text:PATH`."""
    context: int | None = None
    text_test_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """Shape and size of a registered dataset, known without loading it (`outline` of a loader)."""

    sample_shape: tuple[int, ...]
    """(channels, height, width) of images, (context,) of text."""
    classes: int
    train_samples: int
    test_samples: int
    """The full size, or the default size where the loader generates any number of samples."""
    has_tokens: bool = False
    """Whether samples are text, with a target for each token."""


Loader = Callable[[LoadRequest], Dataset]
"""Type of a registry entry. A loader may return more samples than the request asks for."""
