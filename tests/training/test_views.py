"""Test-time augmentation: which views are averaged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.training.views import averaged_over_views

IMAGE = torch.arange(12.0).view(1, 1, 3, 4)
SHIFTED_UP_LEFT = torch.tensor([[5.0, 6, 7, 7], [9, 10, 11, 11], [9, 10, 11, 11]]).view(1, 1, 3, 4)
SHIFTED_DOWN_RIGHT = torch.tensor([[0.0, 0, 1, 2], [0, 0, 1, 2], [4, 4, 5, 6]]).view(1, 1, 3, 4)
VIEWS = [
    view
    for image in (IMAGE, SHIFTED_UP_LEFT, SHIFTED_DOWN_RIGHT)
    for view in (image, image.flip(3))
]


@pytest.mark.parametrize("views", [1, 2, 3, 6])
def test_logits_are_the_mean_over_the_first_views(views: int) -> None:
    seen: list[Tensor] = []

    def forward(images: Tensor) -> Tensor:
        seen.append(images.clone())
        return images.flatten(1) * len(seen)

    logits = averaged_over_views(forward, views)(IMAGE)
    assert len(seen) == views
    for view, expected in zip(seen, VIEWS, strict=False):
        assert torch.equal(view, expected)
    weighted = [view.flatten(1) * number for number, view in enumerate(seen, 1)]
    torch.testing.assert_close(logits, torch.stack(weighted).mean(0))
