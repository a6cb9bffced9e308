"""Rotary positions of attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.models.attention import rotate, rotation_of

HEAD_WIDTH = 8


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_products_depend_on_the_distance_of_positions_only() -> None:
    query, key = vectors(1, HEAD_WIDTH), vectors(1, HEAD_WIDTH, seed=1)

    def product(query_at: int, key_at: int) -> float:
        pair = ((query, query_at), (key, key_at))
        rotated = [rotate(each, rotation_of(at, 1, HEAD_WIDTH, each)) for each, at in pair]
        return float((rotated[0] * rotated[1]).sum())

    assert product(7, 3) == pytest.approx(product(104, 100), rel=1e-12)
    assert product(7, 3) != pytest.approx(product(7, 4), rel=1e-3)


def test_rotation_keeps_lengths_and_the_first_position() -> None:
    several = vectors(5, HEAD_WIDTH)
    rotated = rotate(several, rotation_of(0, 5, HEAD_WIDTH, several))
    torch.testing.assert_close(rotated.norm(dim=1), several.norm(dim=1))
    assert torch.equal(rotated[0], several[0])
