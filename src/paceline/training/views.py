"""Test-time augmentation: a prediction as the mean over several views of each image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from torch import Tensor
from torch.nn import functional as F

SHIFTS = ((0, 0), (-1, -1), (1, 1))
"""Rows and columns that a view is moved by; each is also mirrored, which gives six views."""


def averaged_over_views(
    forward: Callable[[Tensor], Tensor], views: int
) -> Callable[[Tensor], Tensor]:
    """Return a forward pass whose logits are the mean over the first `views` views."""
    if views == 1:
        return forward

    def averaged(images: Tensor) -> Tensor:
        logits = [forward(view).float() for view in islice(_views(images), views)]
        return sum(logits[1:], logits[0]) / views

    return averaged


def _views(images: Tensor) -> Iterator[Tensor]:
    """Yield images and their mirror images, then the same shifted; edge pixels are repeated."""
    height, width = images.shape[2:]
    for down, right in SHIFTS:
        shifted = images
        if down or right:
            padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
            shifted = padded[:, :, 1 - down : 1 - down + height, 1 - right : 1 - right + width]
        yield shifted
        yield shifted.flip(3)
