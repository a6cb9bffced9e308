"""Attention: rotary positions, and gradients that are the same each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.models.attention import (
    causal_attention,
    fix_order_of_sums,
    rotate,
    rotation_of,
)

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


class Watch(TorchDispatchMode):
    """Records in which operations deterministic algorithms are required."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: dict[str, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[func.__name__] = torch.are_deterministic_algorithms_enabled()
        return func(*args, **(kwargs or {}))


def test_deterministic_algorithms_are_required_only_for_the_gradients_of_attention() -> None:
    projection = torch.eye(HEAD_WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = vectors(2, 2, 6, HEAD_WIDTH) @ projection
    attended = F.scaled_dot_product_attention(inputs, inputs, inputs, is_causal=True)
    fix_order_of_sums(attended)
    with Watch() as watch:
        (attended @ projection).sum().backward()
    required = {name for name, is_required in watch.operations.items() if is_required}
    assert "mm.default" in watch.operations
    assert required == {"_scaled_dot_product_flash_attention_for_cpu_backward.default"}
    assert not torch.are_deterministic_algorithms_enabled()


def test_attention_that_is_not_fused_stays_as_it_is() -> None:
    """Matrix products would fail: they need a setting of cuBLAS to be deterministic."""
    inputs = vectors(2, 6, HEAD_WIDTH).requires_grad_()
    attended = inputs.softmax(-1) @ inputs.mT
    fix_order_of_sums(attended)
    with Watch() as watch:
        attended.sum().backward()
    assert not any(watch.operations.values())


@pytest.mark.gpu
@pytest.mark.parametrize("head_width", [16, 32, 36])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_each_time_on_a_gpu(dtype: torch.dtype, head_width: int) -> None:
    """With many blocks of keys, whose gradients are added in any order by default."""
    shape = (3, 2, 4, 2048, head_width)
    parts = vectors(*shape).to("cuda", dtype).requires_grad_()
    upstream = vectors(*shape[1:], seed=1).to("cuda", dtype)
    found = []
    with torch.nn.attention.sdpa_kernel(
        [
            torch.nn.attention.SDPBackend.FLASH_ATTENTION,
            torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION,
        ]
    ):
        for _ in range(10):
            (gradient,) = torch.autograd.grad(causal_attention(*parts), parts, upstream)
            found.append(gradient)
    assert all(torch.equal(found[0], other) for other in found[1:])
