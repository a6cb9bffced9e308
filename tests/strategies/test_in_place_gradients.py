"""Gradients in shared memory that another worker reads in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.strategies.flat_buffer import FlatBuffer
from paceline.strategies.shared.gradients import InPlaceGradients


def keep_gradients(model: nn.Module) -> None:
    return


def drop_gradients(model: nn.Module) -> None:
    """As `optimizer.zero_grad()` does."""
    for weight in model.parameters():
        weight.grad = None


def replace_gradients(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)


@pytest.mark.parametrize("disturb", [keep_gradients, drop_gradients, replace_gradients])
def test_sum_covers_all_workers_if_gradient_views_were_replaced(
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


def test_missing_gradient_counts_as_zero_and_old_sums_are_dropped() -> None:
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
