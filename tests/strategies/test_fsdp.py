"""FSDP: sharded during training, with full weights in checkpoints and after training.

tests/strategies/contract/ checks that it matches one worker for any world size.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.cost import Network
from paceline.errors import ConfigError
from paceline.strategies.fsdp import Fsdp
from paceline.strategies.sharded import Sharded
from paceline.strategies.strategy import ModelShape, SingleProcess, Strategy
from tests.support import odd_shapes as odd
from tests.support.worker_pool import WorkerPool

WORKERS = 3


@dataclass
class Seen:
    """Observations of one worker."""

    elements_held: int
    state_elements: int
    optimizer_state: dict[str, Any]
    half: Tensor
    """The weights after two steps."""
    final: Tensor
    """The weights of the model after four steps and `finish`."""
    is_ordinary: bool
    held_all: tuple[bool, bool]
    """`has_full_weights` during and after training."""
    step_bytes: dict[str, int]
    exchanges: int
    evaluated: list[float]
    resumed: Tensor


def train_and_look(communicator: Communicator, packed: bytes) -> Seen:
    saved = torch.load(io.BytesIO(packed), weights_only=True)
    model = odd.OddModel()
    strategy = odd.attached(Fsdp(), odd.build(communicator, "adam", model))
    odd.train(strategy, range(1))
    strategy.replica.exposed.clear()
    counts = communicator.traffic.counts
    before = {kind: counts[kind].bytes_sent for kind in ("gradients", "parameters")}
    odd.train(strategy, range(1, 2))
    step_bytes = {kind: counts[kind].bytes_sent - earlier for kind, earlier in before.items()}
    exchanges = len(strategy.replica.exposed.began)
    split = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
    with strategy.eval_weights(), torch.inference_mode():
        # Each worker evaluates a different number of batches.
        batches = range(communicator.rank + 1)
        evaluated = [float(strategy.replica.forward(torch.tensor([one]))) for one in batches]
    half, optimizer_state = odd.weights_of(strategy), strategy.checkpoint.optimizer_state_dict()
    held_all = strategy.checkpoint.has_full_weights
    odd.train(strategy, range(2, 4))
    strategy.finish()
    resumed = odd.attached(Fsdp(), odd.build(communicator, "adam"))
    resumed.checkpoint.load_model_state_dict(saved["model"])
    resumed.checkpoint.load_optimizer_state_dict(saved["optimizer"])
    odd.train(resumed, range(2, 4))
    return Seen(
        elements_held=sum(weight.to_local().numel() for weight in split),
        state_elements=sum(
            state["exp_avg"].numel() for state in strategy.optimizer.optimizer.state.values()
        ),
        optimizer_state=optimizer_state,
        half=half,
        final=torch.cat([weight.detach().flatten() for weight in model.parameters()]),
        is_ordinary=type(model) is odd.OddModel
        and all(type(weight) is nn.Parameter for weight in model.parameters()),
        held_all=(held_all, strategy.checkpoint.has_full_weights),
        step_bytes=step_bytes,
        exchanges=exchanges,
        evaluated=evaluated,
        resumed=odd.weights_of(resumed),
    )


@dataclass
class Alone:
    """Weights of a single process, and its checkpoint after two steps."""

    half: Tensor
    final: Tensor
    saved: dict[str, Any]
    evaluated: list[float]


def train_alone(communicator: Communicator) -> Alone:
    strategy = odd.attached(SingleProcess(), odd.build(communicator, "adam"))
    odd.train(strategy, range(2))
    model = {name: value.clone() for name, value in strategy.checkpoint.model_state_dict().items()}
    state = strategy.checkpoint.optimizer_state_dict()
    states = {
        number: {name: value.clone() for name, value in values.items()}
        for number, values in state["state"].items()
    }
    saved = {"model": model, "optimizer": {**state, "state": states}}
    half = odd.weights_of(strategy)
    with torch.inference_mode():
        seeds = range(WORKERS)
        evaluated = [float(strategy.replica.forward(torch.tensor([seed]))) for seed in seeds]
    odd.train(strategy, range(2, 4))
    return Alone(half, odd.weights_of(strategy), saved, evaluated)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(WORKERS) as workers:
        yield workers


@pytest.fixture(scope="module")
def alone() -> Alone:
    return in_process.run(1, train_alone)[0]


@pytest.fixture(scope="module")
def seen(pool: WorkerPool, alone: Alone) -> list[Seen]:
    # As bytes, because a process that sends tensors keeps a thread.
    packed = io.BytesIO()
    torch.save(alone.saved, packed)
    # PyTorch has one default group at a time, so this group is not kept.
    return pool.run(WORKERS, train_and_look, packed.getvalue(), fresh=True)


def rows_held(rank: int) -> int:
    """Return the number of elements in the rows of each weight that a worker holds."""
    elements = 0
    for rows, *rest in odd.SHAPES:
        most = math.ceil(rows / WORKERS)
        elements += max(0, min(most, rows - rank * most)) * math.prod(rest)
    return elements


def test_each_worker_holds_its_rows_and_their_optimizer_state(seen: list[Seen]) -> None:
    held = [(worker.elements_held, worker.state_elements) for worker in seen]
    assert held == [(rows_held(rank), rows_held(rank)) for rank in range(WORKERS)]


def test_weights_equal_those_of_one_worker(seen: list[Seen], alone: Alone) -> None:
    # A fused optimizer rounds the end of a tensor differently, and shards end anywhere.
    for worker in seen:
        torch.testing.assert_close(worker.half, alone.half, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(worker.final, alone.final, rtol=1e-6, atol=1e-6)
        assert torch.equal(worker.final, seen[0].final)


def test_finish_restores_a_plain_model_with_all_weights(seen: list[Seen]) -> None:
    for worker in seen:
        assert worker.is_ordinary
        assert worker.held_all == (False, True)


def test_gathered_optimizer_state_equals_that_of_one_worker(seen: list[Seen], alone: Alone) -> None:
    gathered, expected = seen[0].optimizer_state, alone.saved["optimizer"]
    assert gathered["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(gathered["state"], expected["state"], rtol=1e-5, atol=1e-6)


def test_checkpoint_of_one_worker_is_restored(seen: list[Seen], alone: Alone) -> None:
    for worker in seen:
        torch.testing.assert_close(worker.resumed, alone.final, rtol=1e-6, atol=1e-6)


def test_checkpoint_is_restored_by_another_strategy(seen: list[Seen], alone: Alone) -> None:
    names = [name for name in alone.saved["model"] if name.endswith("weight")]
    shapes = [alone.saved["model"][name].shape for name in names]
    parts = seen[0].half.split([shape.numel() for shape in shapes])
    weights = {
        name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)
    }

    def work(communicator: Communicator) -> Tensor:
        strategy: Strategy = odd.attached(Sharded(), odd.build(communicator, "adam"))
        strategy.checkpoint.load_model_state_dict({**alone.saved["model"], **weights})
        strategy.checkpoint.load_optimizer_state_dict(seen[0].optimizer_state)
        odd.train(strategy, range(2, 4))
        return odd.weights_of(strategy)

    for final in in_process.run(2, work):
        torch.testing.assert_close(final, alone.final, rtol=1e-6, atol=1e-6)


def test_workers_may_evaluate_different_numbers_of_batches(seen: list[Seen], alone: Alone) -> None:
    for rank, worker in enumerate(seen):
        assert worker.evaluated == pytest.approx(alone.evaluated[: rank + 1], rel=1e-4)


def test_step_all_gathers_twice_and_reduce_scatters_once(seen: list[Seen]) -> None:
    # All shards are as large as the first; each is sent to every other worker.
    moved = (WORKERS - 1) * rows_held(0) * 4
    for worker in seen:
        assert worker.step_bytes == {"gradients": moved, "parameters": 2 * moved}


def test_all_workers_record_three_exchanges_per_block(seen: list[Seen]) -> None:
    assert [worker.exchanges for worker in seen] == [3 * len(odd.SHAPES)] * WORKERS


def test_cost_is_one_and_a_half_times_that_of_gradient_averaging() -> None:
    cost = Fsdp().cost(ModelShape(4, (4000, 8000)), Network(0.001, 1e6))
    assert cost.bytes_sent == 3 * 3 / 4 * 12000
    assert cost.messages == 3 * 3 * 2
    assert cost.seconds == pytest.approx(18 * 0.001 + 27000 / 1e6)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.middle, self.other = (nn.Linear(2, 2) for _ in range(3))
        self.other.weight = self.one.weight

    def forward(self, inputs: Tensor) -> Tensor:
        # In place on a view.
        between: Tensor = self.middle(self.one(inputs)).relu_()
        outputs: Tensor = self.other(between)
        return outputs


def train_tied(communicator: Communicator) -> tuple[bool, bool, bool]:
    """Whether shared weights are equal in a checkpoint, load again, and stay shared at the end."""
    strategy = odd.attached(Fsdp(), odd.build(communicator, "sgd", Tied()))
    model = strategy.replica.model
    strategy.backward(strategy.replica.forward(torch.ones(2, 3, 2)).sum())
    strategy.step()
    saved = strategy.checkpoint.model_state_dict()
    resumed = odd.attached(Fsdp(), odd.build(communicator, "sgd", Tied()))
    resumed.checkpoint.load_model_state_dict(saved)
    loaded = resumed.checkpoint.model_state_dict()
    strategy.finish()
    return (
        saved["one.weight"] is saved["other.weight"],
        all(torch.equal(value, loaded[name]) for name, value in saved.items()),
        isinstance(model, Tied) and model.one.weight is model.other.weight,
    )


def test_weight_that_modules_share_stays_shared(pool: WorkerPool) -> None:
    assert pool.run(2, train_tied, fresh=True) == [(True, True, True)] * 2


def rejections(communicator: Communicator) -> list[str]:
    cases = [
        odd.build(communicator, "sgd", nn.ParameterList([nn.Parameter(torch.tensor(1.0))])),
        odd.build(communicator, lambda weights: torch.optim.LBFGS(weights), nn.Linear(2, 2)),
    ]
    lines = []
    for case in cases:
        with pytest.raises(ConfigError) as error:
            Fsdp().setup(case)
        lines.append(str(error.value))
    return lines


def test_unshardable_models_are_rejected_in_one_line(pool: WorkerPool) -> None:
    scalar, whole = pool.run(2, rejections)[0]
    assert "is a scalar" in scalar
    assert "LBFGS" in whole


def test_communicator_without_a_process_group_is_rejected_in_one_line() -> None:
    def work(communicator: Communicator) -> str:
        with pytest.raises(ConfigError) as error:
            Fsdp().setup(odd.build(communicator))
        return str(error.value)

    assert "torch.distributed" in in_process.run(2, work)[0]
