"""Loss and accuracy with one prediction per sample or per position of a sample."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from paceline.errors import UserCodeError
from paceline.training.loss import count_correct, cross_entropy

LOGITS = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(12).view(4, 3) % 5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_per_sample_equals_cross_entropy(reduction: str) -> None:
    logits, targets = LOGITS[:, 0], TARGETS[:, 0]
    loss = cross_entropy(logits, targets, label_smoothing=0.1, reduction=reduction)
    expected = F.cross_entropy(logits, targets, label_smoothing=0.1, reduction=reduction)
    assert torch.equal(loss, expected)


def test_positions_count_like_samples() -> None:
    flat_logits, flat_targets = LOGITS.view(12, 5), TARGETS.view(12)
    assert torch.equal(cross_entropy(LOGITS, TARGETS), cross_entropy(flat_logits, flat_targets))
    assert int(count_correct(LOGITS, TARGETS)) == int(count_correct(flat_logits, flat_targets))


@pytest.mark.parametrize("logits", [LOGITS[:, 0], LOGITS.transpose(1, 2), LOGITS[:2]])
def test_outputs_of_another_shape_than_the_targets_are_rejected(logits: torch.Tensor) -> None:
    with pytest.raises(UserCodeError, match=r"outputs of shape \(4, 3, classes\) are needed"):
        cross_entropy(logits, TARGETS)


def test_correct_predictions_are_counted() -> None:
    logits = F.one_hot(TARGETS, 5).float()
    logits[0] = -logits[0]
    assert int(count_correct(logits, TARGETS)) == 9
