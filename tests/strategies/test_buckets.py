"""Gradient buckets: sizes, and gradients that arrive twice."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError, RunError
from paceline.strategies import create_strategy
from paceline.strategies.bucket_layout import MIB, ONE_BUCKET_MIB, split
from paceline.strategies.buckets import Bucket
from tests.support import odd_shapes as odd
from tests.support import toy_replicas as toy


@pytest.mark.parametrize(
    ("strategy", "option"),
    [("overlap", "bucket_mib"), ("overlap", "first_bucket_mib"), ("ddp", "bucket_mib")],
)
def test_negative_bucket_size_is_rejected(strategy: str, option: str) -> None:
    with pytest.raises(
        ConfigError, match=f"-o {option}: must be at least 0 and at most 1000000, got -1"
    ):
        create_strategy(strategy, {option: "-1"})


class UsedTwice(nn.Module):
    """Each of the two forward passes of the layer has its own backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs
        for _ in range(2):
            outputs = checkpoint(self.layer, outputs, use_reentrant=True)
        return outputs


def test_second_gradient_in_one_step_is_rejected() -> None:
    """The first gradient may already be reduced when the second is added to it."""

    def work(communicator: Communicator) -> None:
        replica = odd.build(communicator, toy.sgd(), UsedTwice())
        strategy = odd.attached(create_strategy("overlap", {}), replica)
        with pytest.raises(RunError, match="second gradient in one step"):
            strategy.backward(replica.forward(torch.ones(2, 4, requires_grad=True)).sum())
        strategy.finish()

    in_process.run(1, work)


def test_step_runs_after_its_capture_failed() -> None:
    def work(communicator: Communicator) -> Tensor:
        strategy = create_strategy("overlap", {"bucket_mib": "0.0001"})
        strategy.setup(toy.replica(communicator, toy.sgd()))
        toy.train(strategy, range(2))
        with ExitStack() as capture:
            for observer in strategy.replay_observers():
                capture.enter_context(observer.capture())
            toy.compute(strategy, 2, 0, [1.0])
        strategy.discard_step()
        toy.train(strategy, range(2, 4))
        strategy.finish()
        return toy.weights_of(strategy.replica)

    [weights] = in_process.run(1, work)
    [expected] = toy.trained(1, lambda: create_strategy("overlap", {}), 4, toy.sgd())
    assert torch.equal(weights, expected)


def test_overlap_waits_for_the_communicator_of_its_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[Communicator] = []
    monkeypatch.setattr(Communicator, "synchronize", lambda each: waited.append(each))

    def work(communicator: Communicator) -> None:
        strategy = create_strategy("overlap", {})
        strategy.setup(toy.replica(communicator, toy.sgd()))
        strategy.synchronize()
        assert waited[0] is communicator
        strategy.finish()

    in_process.run(1, work)
    assert len(set(map(id, waited))) == 2


SIZES = [0.25, 3.0, 0.5, 0.5, 1.0, 4.0, 0.25]
"""MiB of weights, in the order of their gradients."""


@pytest.mark.parametrize(
    ("first_mib", "bucket_mib", "layout"),
    [
        (1.0, 2.0, [[1], [0, 2, 3, 4], [5], [6]]),
        (0.25, 2.0, [[0], [1], [2, 3, 4], [5], [6]]),
        (1.0, 4.0, [[1], [5], [0, 2, 3, 4, 6]]),
        (1.0, 0.5, [[1], [2], [3], [4], [5], [0, 6]]),
        (1.0, ONE_BUCKET_MIB, [[0, 1, 2, 3, 4, 5, 6]]),
    ],
)
def test_large_gradients_do_not_wait_for_others(
    first_mib: float, bucket_mib: float, layout: list[list[int]]
) -> None:
    sizes = [round(size * MIB) for size in SIZES]
    assert split(sizes, range(len(sizes)), first_mib, bucket_mib) == layout


def test_large_gradient_is_reduced_where_autograd_put_it() -> None:
    weight = nn.Parameter(torch.ones(3, 2).t())
    bucket = Bucket("0", [weight], [0])
    (weight * torch.arange(6.0).view(2, 3)).sum().backward()
    assert weight.grad is not None
    address, expected = weight.grad.data_ptr(), 2 * weight.grad
    bucket.add(0)
    bucket.gradient().mul_(2)
    assert weight.grad.data_ptr() == address
    assert torch.equal(weight.grad, expected)


def test_large_gradient_is_not_copied_during_the_backward_pass() -> None:
    """Autograd itself must not count as another user of the memory while it calls the hook."""

    def work(communicator: Communicator) -> None:
        model, addresses = nn.Linear(4, 4, bias=False), []

        def record(weight: Tensor) -> None:
            assert weight.grad is not None
            addresses.append(weight.grad.data_ptr())

        # Hooks run in the order of their registration: this one before that of the strategy.
        model.weight.register_post_accumulate_grad_hook(record)
        replica = odd.build(communicator, toy.sgd(), model)
        strategy = odd.attached(create_strategy("overlap", {"bucket_mib": "0"}), replica)
        strategy.backward(replica.forward(torch.ones(2, 4)).sum())
        record(model.weight)
        strategy.step()
        strategy.finish()
        assert addresses == [addresses[0]] * 2

    in_process.run(2, work)


class SharedGradient(nn.Module):
    """Autograd gives both weights the same memory as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.first.view(-1) + self.second.view(-1)) * inputs


class SparseGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)
        nn.init.ones_(self.table.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        rows: Tensor = self.table(inputs[:2].long())
        return rows


@pytest.mark.parametrize("build", [SharedGradient, SparseGradient])
@pytest.mark.parametrize("bucket_mib", ["0", "1"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_without_memory_of_their_own_are_summed_once(
    build: type[nn.Module], bucket_mib: str, microbatches: int
) -> None:
    def work(communicator: Communicator, microbatches: int = microbatches) -> list[Tensor]:
        replica = odd.build(communicator, toy.sgd(), build())
        strategy = odd.attached(create_strategy("overlap", {"bucket_mib": bucket_mib}), replica)
        inputs = torch.arange(4.0)
        for last in range(1 - microbatches, 1):
            replica.is_last_microbatch = last == 0
            loss = (replica.forward(inputs) / communicator.world_size).pow(2).sum()
            strategy.backward(loss / microbatches)
        strategy.step()
        strategy.finish()
        return [weight.detach().clone() for weight in replica.model.parameters()]

    [alone] = in_process.run(1, lambda communicator: work(communicator, microbatches=1))
    for weights in in_process.run(4, work):
        # Each of four ranks has a sixteenth of the gradient.
        for own, expected in zip(weights, alone, strict=True):
            torch.testing.assert_close(1 - own, (1 - expected) / 4)
