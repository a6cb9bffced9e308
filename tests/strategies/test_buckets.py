"""Gradient buckets: sizes, and gradients that arrive twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError, RunError
from paceline.strategies import create_strategy
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


@pytest.mark.parametrize(("nodes", "buckets"), [((0, 0), 2), ((0, 1), 3)])
def test_buckets_are_smaller_between_machines(nodes: tuple[int, int], buckets: int) -> None:
    """Of three layers of 4.6 MiB, the first fills a bucket, and the other two share one."""

    def work(communicator: Communicator) -> int:
        layers = nn.Sequential(*(nn.Linear(1100, 1100, bias=False) for _ in range(3)))
        replica = odd.build(communicator, toy.sgd(), layers, node=nodes[communicator.rank])
        strategy = odd.attached(create_strategy("overlap", {}), replica)
        strategy.backward(replica.forward(torch.ones(1, 1100)).sum())
        strategy.step()
        strategy.finish()
        return communicator.traffic.counts["gradients"].messages

    messages_each = 2  # of a ring of two
    assert in_process.run(2, work) == [messages_each * buckets] * 2


def test_resumed_run_keeps_its_bucket_size_on_one_machine() -> None:
    def work(communicator: Communicator) -> list[int]:
        messages, state = [], None
        for node in (communicator.rank, 0):
            layers = nn.Sequential(*(nn.Linear(1100, 1100, bias=False) for _ in range(3)))
            replica = odd.build(communicator, toy.sgd(), layers, node=node)
            strategy = odd.attached(create_strategy("overlap", {}), replica)
            if state is not None:
                strategy.load_state_dict(state)
            before = communicator.traffic.counts["gradients"].messages
            strategy.backward(replica.forward(torch.ones(1, 1100)).sum())
            strategy.step()
            messages.append(communicator.traffic.counts["gradients"].messages - before)
            state = strategy.state_dict()
            strategy.finish()
        return messages

    assert in_process.run(2, work) == [[6, 6]] * 2
