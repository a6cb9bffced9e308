"""Linear layers whose gradients are exchanged as factors match one worker."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.shm.segment import SharedSegment
from paceline.data.sampling import shard_bounds
from paceline.errors import RunError
from paceline.strategies import create_strategy
from paceline.strategies.shared import gradients, linear_factors
from paceline.strategies.shared import strategy as shared
from paceline.strategies.shared.linear_factors import (
    LinearGradientFactors,
    factor_bytes,
    layers_to_factor,
)
from tests.strategies.contract.harness import Connections, Task, build_replica, run_ranks
from tests.support.worker_pool import WorkerPool


class Layers(nn.Module):
    """Layers over sequences; the first has room for 8 rows of factors, the second for 5."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 80, bias=False)
        self.second = nn.Linear(80, 12)
        self.seldom = nn.Linear(12, 12)
        self.skips = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.first(inputs).relu())
        return hidden if self.skips else hidden + self.seldom(hidden)


PLAIN = Task(batches=(4, 4, 4, 1), lr=0.1, weight_decay=0.0)
"""Batches hold sequences of length two."""
TASKS = {
    "all fit": PLAIN,
    "too many": replace(PLAIN, batches=(40, 40, 3)),
    "some fit": replace(PLAIN, batches=(24, 24, 6), accumulate=3),
    "unequal": replace(PLAIN, batches=(9, 9, 9), shares=(3.0, 1.0, 2.0, 1.0)),
}


def train(
    connections: Connections, name: str, task: Task, least_weight_bytes: int = 0
) -> dict[str, Tensor]:
    """Train with all layers factored, early publication, and one chunk per worker."""
    with (
        patch.object(linear_factors, "MIN_WEIGHT_BYTES", least_weight_bytes),
        patch.object(gradients, "EARLY_PUBLISH_BYTES", 0),
        patch.object(shared, "MIN_SHARD_BYTES", 64),
    ):
        return _train(connections, name, task)


def _train(connections: Connections, name: str, task: Task) -> dict[str, Tensor]:
    torch.manual_seed(connections.communicator.rank)
    model = Layers().double()
    strategy = create_strategy(name, {})
    strategy.setup(build_replica(model, connections, task))
    generator = torch.Generator().manual_seed(7)
    world_size, rank = connections.communicator.world_size, connections.communicator.rank
    for step, samples in enumerate(task.batches):
        inputs = torch.randn(samples, 2, 20, generator=generator, dtype=torch.float64)
        part = shard_bounds(samples, (task.shares or (1.0,) * 4)[:world_size], rank)
        model.skips = step == 1
        own = inputs[part]
        chunks = own.tensor_split(task.accumulate) if len(own) else [inputs[:1]]
        for number, chunk in enumerate(chunks, 1):
            strategy.replica.is_last_microbatch = number == len(chunks)
            weight = 1.0 / samples if len(own) else 0.0
            strategy.backward(strategy.replica.forward(chunk).square().sum() * weight)
        strategy.step()
    strategy.finish()
    assert "forward" not in vars(model.first), "the layer's own forward pass is not back"
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


@cache
def alone(task: Task) -> dict[str, Tensor]:
    def work(communicator: Communicator) -> dict[str, Tensor]:
        return train(Connections(communicator), "single", task)

    return in_process.run(1, work)[0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("label", TASKS)
def test_factored_layers_match_one_worker(pool: WorkerPool, label: str, world_size: int) -> None:
    expected = alone(replace(TASKS[label], shares=()))
    for rank, own in enumerate(run_ranks(pool, world_size, train, "shared", TASKS[label])):
        for key, value in expected.items():
            torch.testing.assert_close(
                own[key], value, rtol=1e-11, atol=1e-13, msg=f"{key} on rank {rank}"
            )


def train_without_factors(connections: Connections, name: str, task: Task) -> dict[str, Tensor]:
    return train(connections, name, task, least_weight_bytes=2**30)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_published_without_factors_match_one_worker(
    pool: WorkerPool, world_size: int
) -> None:
    task = TASKS["some fit"]
    expected = alone(task)
    for own in run_ranks(pool, world_size, train_without_factors, "shared", task):
        for key, value in expected.items():
            torch.testing.assert_close(own[key], value, rtol=1e-11, atol=1e-13)


def test_only_plain_layers_with_untied_weights_are_factored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_factors, "MIN_WEIGHT_BYTES", 64)
    plain, small, tied = nn.Linear(8, 8), nn.Linear(2, 2), nn.Linear(8, 8)
    also_tied, frozen = nn.Linear(8, 8), nn.Linear(8, 8)
    also_tied.weight = tied.weight
    frozen.weight.requires_grad_(False)

    class Special(nn.Linear):
        pass

    model = nn.Sequential(plain, small, tied, also_tied, frozen, Special(8, 8))
    assert layers_to_factor(model, list(model.parameters())) == [plain]
    assert layers_to_factor(model, list(tied.parameters())) == []


def test_only_training_passes_record_factors() -> None:
    layer, factored = factored_layer()
    inputs = torch.randn(2, 20, requires_grad=True)
    plain = copy.deepcopy(layer)
    expected = torch.autograd.grad(plain(inputs).sum(), [inputs, plain.weight])
    torch.autograd.grad(layer(inputs).sum(), inputs)
    asked_for = torch.autograd.grad(layer(inputs).sum(), [inputs, layer.weight])
    torch.testing.assert_close(asked_for, expected)
    assert factored.published_bytes == 0
    layer(inputs).sum().backward()
    factored.publish()
    product = factored.multiply(slice(0, layer.weight.numel()))
    torch.testing.assert_close(product.view_as(layer.weight), expected[1])


def factored_layer() -> tuple[nn.Linear, LinearGradientFactors]:
    layer = nn.Linear(20, 80)
    segment = SharedSegment(in_process.single(), factor_bytes(layer))
    return layer, LinearGradientFactors(layer, segment, 0, 0, 1)


def test_second_order_gradients_match_a_plain_layer() -> None:
    layer, factored = factored_layer()
    inputs = torch.randn(2, 20, requires_grad=True)
    [slope] = torch.autograd.grad(layer(inputs).square().sum(), inputs, create_graph=True)
    slope.square().sum().backward()
    factored.publish()
    product = factored.multiply(slice(0, layer.weight.numel())).view_as(layer.weight)
    assert layer.weight.grad is not None
    total = product + layer.weight.grad
    layer.weight.grad = None
    factored.detach()
    [slope] = torch.autograd.grad(layer(inputs).square().sum(), inputs, create_graph=True)
    slope.square().sum().backward()
    torch.testing.assert_close(total, layer.weight.grad)


def test_copied_model_is_not_factored() -> None:
    layer, factored = factored_layer()
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        copied(torch.ones(1, 20)).sum().backward()
        assert copied.weight.grad is not None
    assert factored.published_bytes == 0


def second_gradient(connections: Connections, name: str, task: Task) -> str:
    """Return the error of a second backward pass for one batch."""
    model = Layers().double()
    with (
        patch.object(gradients, "EARLY_PUBLISH_BYTES", 0),
        patch.object(shared, "MIN_SHARD_BYTES", 64),
    ):
        strategy = create_strategy(name, {})
        strategy.setup(build_replica(model, connections, task))
        loss = strategy.replica.forward(torch.ones(1, 2, 20, dtype=torch.float64)).sum()
        try:
            for _ in range(2):
                strategy.replica.model.zero_grad()
                loss.backward(retain_graph=True)
        except RunError as error:
            return str(error)
        finally:
            strategy.finish()
    return "nothing"


def test_second_backward_pass_of_a_batch_is_rejected(pool: WorkerPool) -> None:
    for error in run_ranks(pool, 2, second_gradient, "shared", PLAIN):
        assert error.startswith("--strategy shared: a weight received a second gradient")
