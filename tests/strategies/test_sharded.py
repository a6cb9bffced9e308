"""Sharded optimizer: exact results, equal shards, and checkpoints for any strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.cost import Network
from paceline.errors import ConfigError
from paceline.strategies.gradient_averaging import GradientAveraging
from paceline.strategies.sharded import Sharded
from paceline.strategies.strategy import ModelShape, SingleProcess, Strategy
from tests.support import odd_shapes as odd

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "sharded": Sharded,
    "single": SingleProcess,
    "allreduce": GradientAveraging,
}


@cache
def alone(optimizer: str, steps: int) -> Tensor:
    """Return the weights of one worker that computes all samples."""

    def work(communicator: Communicator) -> Tensor:
        strategy = odd.attached(SingleProcess(), odd.build(communicator, optimizer))
        odd.train(strategy, range(steps))
        return odd.weights_of(strategy)

    return in_process.run(1, work)[0]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", odd.OPTIMIZERS)
def test_weights_are_bit_identical_to_those_of_one_worker(optimizer: str, workers: int) -> None:
    def work(communicator: Communicator) -> Tensor:
        strategy = odd.attached(Sharded(), odd.build(communicator, optimizer))
        odd.train(strategy, range(4))
        return odd.weights_of(strategy)

    for rank, weights in enumerate(in_process.run(workers, work)):
        assert torch.equal(weights, alone(optimizer, 4)), f"rank {rank} differs"


def test_channels_last_weights_keep_strides_and_values() -> None:
    def work(communicator: Communicator) -> tuple[Tensor, list[bool]]:
        model = odd.OddModel(channels_last=True)
        strides = [weight.stride() for weight in model.parameters()]
        strategy = odd.attached(Sharded(), odd.build(communicator, "adam", model))
        odd.train(strategy, range(3))
        kept = [
            weight.stride() == before
            for weight, before in zip(model.parameters(), strides, strict=True)
        ]
        return odd.weights_of(strategy), kept

    for weights, kept in in_process.run(2, work):
        assert all(kept)
        assert torch.equal(weights, alone("adam", 3))


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_each_worker_has_an_equal_shard_of_the_optimizer_state(workers: int) -> None:
    def work(communicator: Communicator) -> int:
        strategy = odd.attached(Sharded(), odd.build(communicator, "adam"))
        odd.train(strategy, range(1))
        assert not strategy.replica.optimizer.state
        states = strategy.optimizer.optimizer.state.values()
        return sum(state["exp_avg"].numel() for state in states)

    elements = sum(weight.numel() for weight in odd.OddModel().parameters())
    parts = in_process.run(workers, work)
    assert sum(parts) == elements
    # Alignment adds up to one cache line per weight and per worker.
    assert max(parts) <= elements / workers + 16 * (len(odd.SHAPES) + 1)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_clipping_uses_the_norm_of_the_full_gradient(workers: int) -> None:
    def work(communicator: Communicator) -> Tensor:
        make = Sharded if workers > 1 or communicator.world_size > 1 else SingleProcess
        strategy = odd.attached(make(), odd.build(communicator, "sgd", clip_norm=0.5))
        odd.train(strategy, range(3))
        return odd.weights_of(strategy)

    expected = alone_with_clipping(0.5)
    results = in_process.run(workers, work)
    assert not torch.allclose(expected, alone("sgd", 3)), "the gradient is never clipped"
    for weights in results:
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(weights, results[0])


def alone_with_clipping(norm: float) -> Tensor:
    def work(communicator: Communicator) -> Tensor:
        strategy = odd.attached(SingleProcess(), odd.build(communicator, "sgd", clip_norm=norm))
        odd.train(strategy, range(3))
        return odd.weights_of(strategy)

    return in_process.run(1, work)[0]


@pytest.mark.parametrize("clip_norm", [None, 1e9])
def test_overflow_in_one_shard_skips_the_step_on_all_workers(
    clip_norm: float | None,
) -> None:
    def work(communicator: Communicator) -> tuple[Tensor, Tensor, float, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        replica = odd.build(communicator, "nesterov", scaler=scaler, clip_norm=clip_norm)
        strategy = odd.attached(Sharded(), replica)
        first = odd.weights_of(strategy)
        # The last element lies in the chunk of the last worker.
        hook = replica.trainable[-1].register_hook(lambda gradient: gradient * float("inf"))
        odd.train(strategy, range(1))
        hook.remove()
        passed_over, scale = odd.weights_of(strategy), scaler.get_scale()
        assert torch.equal(passed_over, first)
        odd.train(strategy, range(3))
        return passed_over, odd.weights_of(strategy), scale, scaler.get_scale()

    for _, weights, scale, later_scale in in_process.run(3, work):
        assert (scale, later_scale) == (512.0, 512.0)
        # Scales are powers of two, so scaling and unscaling are exact.
        assert torch.equal(weights, alone("nesterov", 3))


def test_ranks_without_shards_stay_synchronized() -> None:
    def work(communicator: Communicator) -> Tensor:
        model = nn.Linear(3, 1, bias=False)
        model.weight.data.fill_(1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        replica = odd.build(
            communicator, lambda weights: SGD(weights, lr=0.5), model, scaler=scaler, clip_norm=1e9
        )
        strategy = odd.attached(Sharded(), replica)
        strategy.backward(replica.forward(torch.ones(1, 3)).sum())
        strategy.step()
        state = strategy.checkpoint.optimizer_state_dict()
        strategy.checkpoint.load_optimizer_state_dict(state)
        return model.weight.detach().flatten()

    for weights in in_process.run(4, work):
        assert weights.tolist() == [-1.0, -1.0, -1.0]  # 1 - 0.5 * (ones of 4 workers)


def test_parameter_groups_keep_their_settings() -> None:
    def make(weights: list[nn.Parameter]) -> SGD:
        late: dict[str, Any] = {"params": weights[2:], "momentum": 0.0, "weight_decay": 0.1}
        return SGD([{"params": weights[:2]}, late], lr=0.01, momentum=0.9)

    def work(communicator: Communicator) -> tuple[Tensor, dict[str, Any]]:
        kind = Sharded if communicator.world_size > 1 else SingleProcess
        strategy = odd.attached(kind(), odd.build(communicator, make))
        odd.train(strategy, range(3))
        return odd.weights_of(strategy), strategy.checkpoint.optimizer_state_dict()

    weights, state = in_process.run(1, work)[0]
    split_weights, split_state = in_process.run(3, work)[0]
    assert torch.equal(weights, split_weights)
    assert odd.same_state(state, split_state)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_gathered_state_equals_that_of_a_single_process(optimizer: str) -> None:
    def work(communicator: Communicator) -> dict[str, Any]:
        kind = Sharded if communicator.world_size > 1 else SingleProcess
        strategy = odd.attached(kind(), odd.build(communicator, optimizer))
        odd.train(strategy, range(3))
        return strategy.checkpoint.optimizer_state_dict()

    assert odd.same_state(in_process.run(1, work)[0], in_process.run(3, work)[0])


@pytest.mark.parametrize(
    ("saver", "savers", "loader", "loaders"),
    [
        ("sharded", 2, "single", 1),
        ("single", 1, "sharded", 3),
        ("sharded", 3, "allreduce", 2),
        ("allreduce", 2, "sharded", 2),
        ("sharded", 2, "sharded", 4),
    ],
)
@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
def test_checkpoint_fits_other_strategies_and_world_sizes(
    saver: str, savers: int, loader: str, loaders: int, optimizer: str
) -> None:
    def save(communicator: Communicator) -> tuple[dict[str, Any], dict[str, Any]]:
        strategy = odd.attached(STRATEGIES[saver](), odd.build(communicator, optimizer))
        odd.train(strategy, range(2))
        model = {
            name: value.clone() for name, value in strategy.checkpoint.model_state_dict().items()
        }
        return model, strategy.checkpoint.optimizer_state_dict()

    model_state, optimizer_state = in_process.run(savers, save)[0]

    def load(communicator: Communicator) -> Tensor:
        strategy = odd.attached(STRATEGIES[loader](), odd.build(communicator, optimizer))
        strategy.checkpoint.load_model_state_dict(model_state)
        # The threads share these tensors; a rank that reads a file has its own.
        strategy.checkpoint.load_optimizer_state_dict(copied(optimizer_state))
        odd.train(strategy, range(2, 4))
        return odd.weights_of(strategy)

    for weights in in_process.run(loaders, load):
        assert torch.equal(weights, alone(optimizer, 4))


def copied(state: dict[str, Any]) -> dict[str, Any]:
    states = {
        number: {name: value.clone() for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": states}


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_traffic_matches_the_cost_model(workers: int) -> None:
    def work(communicator: Communicator) -> tuple[int, int, int]:
        strategy = odd.attached(Sharded(), odd.build(communicator))
        counts = communicator.traffic.counts
        before = counts["parameters"].bytes_sent
        odd.train(strategy, range(1))
        gradients, parameters = counts["gradients"], counts["parameters"]
        return gradients.bytes_sent, parameters.bytes_sent - before, gradients.messages

    sizes = tuple(weight.nbytes for weight in odd.OddModel().parameters())
    cost = Sharded().cost(ModelShape(workers, sizes), Network(0.001, 1e9))
    for gradient_bytes, parameter_bytes, messages in in_process.run(workers, work):
        assert gradient_bytes == parameter_bytes == cost.bytes_sent / 2
        assert 2 * messages == cost.messages
    # Half of a ring sends all chunks but one, up to padding.
    least = (workers - 1) / workers * sum(sizes)
    assert least <= cost.bytes_sent / 2 <= least + 64 * (len(sizes) + workers)


@pytest.mark.parametrize(("clip_norm", "exchanges"), [(None, 2), (1.0, 3)])
def test_all_workers_record_the_same_exchanges(clip_norm: float | None, exchanges: int) -> None:
    def work(communicator: Communicator) -> int:
        strategy = odd.attached(Sharded(), odd.build(communicator, clip_norm=clip_norm))
        odd.train(strategy, range(1))
        return len(strategy.replica.exposed.began)

    assert in_process.run(3, work) == [exchanges] * 3


def test_optimizer_that_needs_whole_tensors_is_rejected_in_one_line() -> None:
    def work(communicator: Communicator) -> None:
        replica = odd.build(communicator, lambda weights: LBFGS(weights))
        with pytest.raises(ConfigError, match="cannot shard LBFGS"):
            Sharded().setup(replica)

    in_process.run(1, work)


def test_weights_of_two_dtypes_are_rejected_in_one_line() -> None:
    def work(communicator: Communicator) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        replica = odd.build(communicator, lambda weights: Adam(weights), model)
        with pytest.raises(ConfigError, match="one dtype"):
            Sharded().setup(replica)

    in_process.run(1, work)
