"""Flat buffers of weights with unusual strides or mixed dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.errors import UsageError
from paceline.strategies import create_strategy
from paceline.strategies.flat_buffer import FlatBuffer
from tests.support import odd_shapes as odd


class Gappy(nn.Module):
    """The first weight is every second column of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gappy_weight = nn.Parameter(torch.randn(4, 6, generator=generator)[:, ::2])
        self.other_weight = nn.Parameter(torch.randn(20, generator=generator))

    def forward(self, samples: Tensor) -> Tensor:
        return (samples[:, None] * self.gappy_weight.sum() + 100 * self.other_weight.sum()).sum(1)


@pytest.mark.parametrize("name", ["allreduce", "overlap", "sharded", "local_sgd"])
def test_strided_weight_trains_as_in_a_single_process(name: str) -> None:
    def trained(communicator: Communicator, name: str) -> Tensor:
        replica = odd.build(communicator, "momentum", Gappy())
        strategy = odd.attached(create_strategy(name, {}), replica)
        odd.train(strategy, range(2))
        strategy.finish()
        return odd.weights_of(strategy)

    alone = in_process.run(1, lambda communicator: trained(communicator, "single"))[0]
    own = in_process.run(1, lambda communicator: trained(communicator, name))[0]
    torch.testing.assert_close(own, alone)


def test_weights_of_different_dtypes_are_rejected() -> None:
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    with pytest.raises(UsageError, match=r"float32 on cpu and .*float64 on cpu"):
        FlatBuffer(weights)
