"""Fused pooling, batch norm and GELU: equal to torch's operations up to rounding."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models import fused_norm
from paceline.models.fused_norm import norm_gelu


def build_norm(channels: int, device: str) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=0.4)
    norm.weight.requires_grad_(False)
    nn.init.normal_(norm.bias)
    return norm.to(device)


def random_images(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    images = 2 * torch.randn(shape, generator=generator) + 0.5
    images = images.to(device, dtype).contiguous(memory_format=torch.channels_last)
    return images.requires_grad_()


@pytest.mark.parametrize("pools", [False, True])
def test_cpu_uses_the_operations_of_torch(pools: bool) -> None:
    images = random_images(2, 5, 7, 6, dtype=torch.float32, device="cpu")
    norm = build_norm(5, "cpu")
    expected = F.gelu(norm(F.max_pool2d(images, 2) if pools else images))
    assert torch.equal(norm_gelu(images, norm, pools=pools), expected)


def test_kernels_that_cannot_be_built_are_replaced_by_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = []

    def fail(*_: object) -> Tensor:
        attempts.append(1)
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(fused_norm, "_is_supported", lambda *_: True)
    monkeypatch.setattr(fused_norm, "_fused", fail)
    images = random_images(2, 5, 6, 6, dtype=torch.float32, device="cpu")
    norm, reference = (build_norm(5, "cpu") for _ in range(2))
    reference.load_state_dict(norm.state_dict())
    for _ in range(2):
        expected = F.gelu(reference(images))
        assert torch.equal(norm_gelu(images, norm, pools=False), expected)
    assert int(norm.num_batches_tracked or 0) == 2
    assert len(attempts) == 1
    assert "no C compiler" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 7, 6), (40, 64, 31, 31), (17, 200, 15, 15)])
def test_kernels_equal_the_operations_of_torch(
    shape: tuple[int, ...], pools: bool, dtype: torch.dtype
) -> None:
    """Outputs, gradients and running statistics, against float64 of the same inputs."""
    images = random_images(*shape, dtype=dtype, device="cuda")
    norm, reference = (build_norm(shape[1], "cuda") for _ in range(2))
    reference.load_state_dict(norm.state_dict())
    reference.double()
    exact = images.detach().double().requires_grad_()
    assert fused_norm._can_fuse(images, norm)
    output = norm_gelu(images, norm, pools=pools)
    expected = F.gelu(reference(F.max_pool2d(exact, 2) if pools else exact))
    close = partial(torch.testing.assert_close, atol=2e-4, rtol=2e-4)
    if dtype == torch.bfloat16:
        close = partial(torch.testing.assert_close, atol=0.05, rtol=0.02)
    close(output.double(), expected)
    weights = torch.randn_like(expected).to(dtype)
    output.backward(weights)
    expected.backward(weights.double())
    assert images.grad is not None
    assert exact.grad is not None
    close(images.grad.double(), exact.grad)
    assert norm.bias.grad is not None
    torch.testing.assert_close(norm.bias.grad.double(), reference.bias.grad, atol=0.05, rtol=0.02)
    found, wanted = norm.state_dict(), reference.state_dict()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(
            found[name].double(), wanted[name].double(), atol=1e-3, rtol=1e-3
        )
