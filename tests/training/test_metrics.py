"""Metrics of the test set by name."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.analysis.validation import is_number
from paceline.data.dataset import Dataset, Split, TokenTransform, Transform
from paceline.data.image_transforms import ImageTransform
from paceline.training.metrics import metrics_of


def dataset(transform: Transform | None) -> Dataset:
    split = Split(torch.zeros(1, 1), torch.zeros(1, 1))
    return Dataset("any", split, split, 2, transform)


@pytest.mark.parametrize("transform", [None, ImageTransform((0.5,), (0.5,))])
def test_images_and_floats_have_accuracy(transform: ImageTransform | None) -> None:
    assert metrics_of(dataset(transform), 2.0, 0.5) == {"accuracy": 0.5}


def test_tokens_have_perplexity_and_bytes_have_bits() -> None:
    loss = math.log(8)
    assert metrics_of(dataset(TokenTransform()), loss, 0.5) == {
        "accuracy": 0.5,
        "perplexity": pytest.approx(8),
    }
    assert metrics_of(dataset(TokenTransform(is_bytes=True)), loss, 0.5) == {
        "accuracy": 0.5,
        "perplexity": pytest.approx(8),
        "bits_per_byte": pytest.approx(3),
    }


def test_perplexity_that_is_too_large_for_the_records_is_none() -> None:
    for loss in (140.0, 1e4):
        assert metrics_of(dataset(TokenTransform()), loss, 0.0)["perplexity"] is None
    assert is_number(metrics_of(dataset(TokenTransform()), 138.0, 0.0)["perplexity"])
