"""The weight hash depends on the values of the weights, not on their layout or device."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from paceline.training.rank_report import weights_sha256

WEIGHTS = {
    "conv": torch.arange(48.0).reshape(2, 3, 2, 4),
    "bias": torch.tensor([1.0, -2.0]),
    "steps": torch.tensor(3),
    "half": torch.tensor([0.5], dtype=torch.bfloat16),
}


def test_hash_covers_the_documented_bytes() -> None:
    expected = hashlib.sha256(
        b'["a", "torch.int16", [2]]\n\x01\x00\x02\x00["b", "torch.float32", []]\n\x00\x00\x80\x3f'
    ).hexdigest()
    weights = {"b": torch.tensor(1.0), "a": torch.tensor([1, 2], dtype=torch.int16)}
    assert weights_sha256(weights) == expected


@pytest.mark.parametrize(
    "same",
    [
        dict(reversed(WEIGHTS.items())),
        {**WEIGHTS, "conv": WEIGHTS["conv"].to(memory_format=torch.channels_last)},
        {**WEIGHTS, "bias": torch.nn.Parameter(torch.tensor([1.0, 9.0, -2.0])[::2])},
    ],
    ids=["another order", "channels last", "a strided parameter"],
)
def test_hash_is_independent_of_memory_layout(same: dict[str, Tensor]) -> None:
    assert weights_sha256(same) == weights_sha256(WEIGHTS)


@pytest.mark.gpu
def test_hash_is_independent_of_the_device() -> None:
    on_device = {name: tensor.cuda() for name, tensor in WEIGHTS.items()}
    assert weights_sha256(on_device) == weights_sha256(WEIGHTS)


@pytest.mark.parametrize(
    "other",
    [
        {**WEIGHTS, "bias": torch.nextafter(WEIGHTS["bias"], torch.tensor(9.0))},
        {**WEIGHTS, "bias": torch.tensor([1.0, -2.0], dtype=torch.float64)},
        {**WEIGHTS, "bias": torch.tensor([[1.0, -2.0]])},
        {**WEIGHTS, "more": torch.empty(0)},
        {("offset" if name == "bias" else name): value for name, value in WEIGHTS.items()},
    ],
    ids=["one bit", "dtype", "shape", "an empty tensor more", "a name"],
)
def test_hash_changes_with_any_difference(other: dict[str, Tensor]) -> None:
    assert weights_sha256(other) != weights_sha256(WEIGHTS)
