"""Gradients of attention and embeddings are the same each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.models.attention import causal_attention
from paceline.models.determinism import fix_order_of_sums

HEAD_WIDTH = 8


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Watch(TorchDispatchMode):
    """Records in which operations deterministic algorithms are required."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: dict[str, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[func.__name__] = torch.are_deterministic_algorithms_enabled()
        return func(*args, **(kwargs or {}))


def test_deterministic_algorithms_are_required_only_for_attention_and_embeddings() -> None:
    projection = torch.eye(HEAD_WIDTH, dtype=torch.float64, requires_grad=True)
    embedded = F.embedding(torch.arange(24).view(2, 2, 6), vectors(24, HEAD_WIDTH).requires_grad_())
    fix_order_of_sums(embedded)
    inputs = embedded @ projection
    attended = F.scaled_dot_product_attention(inputs, inputs, inputs, is_causal=True)
    fix_order_of_sums(attended)
    with Watch() as watch:
        (attended @ projection).sum().backward()
    required = {name for name, is_required in watch.operations.items() if is_required}
    assert "mm.default" in watch.operations
    assert required == {
        "_scaled_dot_product_flash_attention_for_cpu_backward.default",
        "embedding_dense_backward.default",
    }
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
@pytest.mark.parametrize(
    ("backend", "dtype", "head_width"),
    [
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16, 16),
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16, 32),
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16, 36),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32, 16),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32, 36),
        (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16, 32),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_gradients_of_attention_are_the_same_each_time_on_a_gpu(
    backend: SDPBackend, dtype: torch.dtype, head_width: int
) -> None:
    """With many blocks of keys, whose gradients are added in any order by default."""
    shape = (3, 4, 4, 2048, head_width)
    parts = vectors(*shape).to("cuda", dtype).requires_grad_()
    upstream = vectors(*shape[1:], seed=1).to("cuda", dtype)
    with sdpa_kernel(backend):
        found = [
            torch.autograd.grad(causal_attention(*parts), parts, upstream)[0] for _ in range(30)
        ]
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.gpu
def test_gradients_of_an_embedding_are_the_same_each_time_on_a_gpu() -> None:
    weight = vectors(256, 48).to("cuda", torch.float32).requires_grad_()
    tokens = torch.randint(40, (16, 1024), generator=torch.Generator().manual_seed(2)).cuda()
    upstream = vectors(16, 1024, 48, seed=1).to("cuda", torch.float32)
    found: list[Tensor] = []
    for _ in range(30):
        embedded = F.embedding(tokens, weight)
        fix_order_of_sums(embedded)
        found += torch.autograd.grad(embedded, weight, upstream)
    assert all(torch.equal(found[0], other) for other in found[1:])
