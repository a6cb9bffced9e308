"""Causal attention with rotary position embeddings, and the cache of its keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.models.determinism import fix_order_of_sums

ROTARY_BASE = 10_000
"""Rotary embeddings distinguish positions up to about this many tokens apart."""


def rotation_of(first: int, length: int, head_width: int, like: Tensor) -> Tensor:
    """Return the factors of `rotate` for positions from `first`, (2, length, head width)."""
    pairs = torch.arange(head_width // 2, device=like.device, dtype=like.dtype)
    positions = torch.arange(first, first + length, device=like.device, dtype=like.dtype)
    angles = torch.outer(positions, ROTARY_BASE ** (-pairs / (head_width // 2)))
    cosines, sines = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1)])


def rotate(vectors: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair of elements of a vector, i and i + half, by the angle of its position.

    Products of rotated queries and keys depend on the distance of their positions only.
    """
    cosines, sines = rotation
    # Operations on whole vectors instead of on each half: few kernels.
    others = vectors.roll(vectors.shape[-1] // 2, -1)
    # The angles are more precise than vectors under autocast.
    rotated: Tensor = vectors * cosines + others * sines
    return rotated.to(vectors.dtype)


@dataclass(slots=True)
class KeysAndValues:
    """Of the tokens that one attention layer has seen, for generation token by token."""

    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of the next tokens; return those of all tokens."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)
        self.keys, self.values = keys, values
        return keys, values


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend to the same and earlier tokens; a single query attends to all keys.

    The gradients are the same each time, also on a GPU.
    """
    is_causal = queries.shape[-2] == keys.shape[-2]
    attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=is_causal)
    if attended.is_cuda:
        fix_order_of_sums(attended)
    return attended
