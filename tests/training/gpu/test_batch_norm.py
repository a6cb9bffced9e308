"""Fast batch norm: the same layer and results as torch's, up to rounding."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from torch import Tensor, nn

from paceline.training.gpu.batch_norm import FastBatchNorm2d, use_fast_batch_norm

SHAPES = [
    (16, 64, 8, 8),
    (3, 10, 5, 7),
    (2, 130, 3, 3),
    (64, 512, 4, 4),
    (128, 64, 32, 32),
    (1, 1, 2, 1),
]


def layer(channels: int) -> nn.BatchNorm2d:
    generator = torch.Generator().manual_seed(channels)
    made = nn.BatchNorm2d(channels)
    with torch.no_grad():
        made.weight.copy_(torch.rand(channels, generator=generator) + 0.5)
        made.bias.copy_(torch.randn(channels, generator=generator))
    return made


def fast(original: nn.BatchNorm2d) -> nn.BatchNorm2d:
    converted = copy.deepcopy(original)
    converted.__class__ = FastBatchNorm2d
    return converted


@pytest.mark.parametrize("training", [True, False])
def test_unsupported_inputs_use_the_layer_of_torch(training: bool) -> None:
    original = layer(4).train(training)
    converted = fast(original)
    inputs = torch.randn(6, 4, 3, 3)
    assert torch.equal(converted(inputs), original(inputs))
    for name, value in original.state_dict().items():
        assert torch.equal(converted.state_dict()[name], value), name


def test_kernels_that_cannot_be_built_are_replaced_by_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = []

    def fail(*_: object) -> Tensor:
        attempts.append(1)
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(FastBatchNorm2d, "_is_supported", lambda *_: True)
    monkeypatch.setattr(FastBatchNorm2d, "_normalize", fail)
    original = layer(4)
    converted = fast(original)
    inputs = torch.randn(6, 4, 3, 3)
    for _ in range(2):
        assert torch.equal(converted(inputs), original(inputs))
    assert len(attempts) == 1
    assert "no C compiler" in caplog.text


def test_layers_are_converted_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.BatchNorm2d): ...

    shared = layer(3)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), shared, Own(3), nn.Sequential(shared))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert not use_fast_batch_norm(model), "without Triton"
    assert type(shared) is nn.BatchNorm2d
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    before = list(model.state_dict())
    assert use_fast_batch_norm(model)
    assert type(shared) is FastBatchNorm2d
    assert type(model[2]) is Own
    assert list(model.state_dict()) == before


def results(used: nn.BatchNorm2d, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    leaf = inputs.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    output = used(leaf)
    output.backward(gradient.to(output.dtype))
    assert leaf.grad is not None
    assert used.weight.grad is not None
    assert used.bias.grad is not None
    return {
        "output": output.detach(),
        "input": leaf.grad,
        "weight": used.weight.grad,
        "bias": used.bias.grad,
        **used.state_dict(),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_batch_norm_in_fp32_up_to_rounding(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    # The mean is large compared to the standard deviation, where a variance is easily inexact.
    inputs = (torch.randn(shape, generator=generator) + 20).to("cuda", torch.bfloat16)
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    gradient = torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)
    original = layer(shape[1]).cuda()
    converted = [fast(original) for _ in range(2)]
    expected = results(original, inputs.float(), gradient)
    found, again = (results(each, inputs, gradient) for each in converted)
    for name, value in expected.items():
        assert torch.equal(found[name], again[name]), "not the same in every run"
        is_rounded = found[name].dtype == torch.bfloat16
        torch.testing.assert_close(
            found[name].to(value.dtype),
            value,
            rtol=1e-2 if is_rounded else 1e-4,
            atol=2e-2 if is_rounded else 1e-3,
        )
