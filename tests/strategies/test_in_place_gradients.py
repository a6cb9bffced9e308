"""Gradients of a small model in memory that another worker reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.strategies.flat_buffer import FlatBuffer
from paceline.strategies.shared.gradients import InPlaceGradients


def forget_none(model: nn.Module) -> None:
    return


def forget_all(model: nn.Module) -> None:
    """As `optimizer.zero_grad()` does, which belongs to many people's loops."""
    for weight in model.parameters():
        weight.grad = None


def replace_all(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)


@pytest.mark.parametrize("disturb", [forget_none, forget_all, replace_all])
def test_the_sum_covers_all_workers_even_if_views_were_replaced(
    disturb: Callable[[nn.Module], None],
) -> None:
    models = [nn.Linear(5, 3), nn.Linear(5, 3)]
    weights = [list(model.parameters()) for model in models]
    memories = [FlatBuffer(weights[0], shards=1) for _ in models]
    workers = [
        InPlaceGradients(members, memories, local_rank)
        for local_rank, members in enumerate(weights)
    ]
    for local_rank, model in enumerate(models):
        disturb(model)
        model(torch.full((1, 5), local_rank + 1.0)).sum().backward()
    for worker in workers:
        worker.publish()
    workers[0].reduce()
    assert torch.equal(memories[0].views[0], torch.full((3, 5), 3.0))
    assert torch.equal(memories[0].views[1], torch.full((3,), 2.0))


def test_a_weight_without_gradient_counts_as_zero_and_old_sums_are_forgotten() -> None:
    model = nn.Linear(5, 3)
    weights = list(model.parameters())
    memories = [FlatBuffer(weights, shards=1) for _ in range(2)]
    worker = InPlaceGradients(weights, memories, 1)
    model(torch.ones(1, 5)).sum().backward()
    worker.publish()
    worker.reset()
    model.bias.grad = None
    worker.publish()
    assert not memories[1].tensor.any()
