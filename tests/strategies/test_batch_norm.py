"""Synchronized batch norm in models that use its layers in unusual ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.strategies.sync_batch_norm import convert_sync_batch_norm


class UsedTwice(nn.Module):
    """One layer registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self.after = nn.BatchNorm1d(3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.after(self.before(inputs).exp())
        return outputs


def test_layer_used_twice_normalizes_over_all_workers_each_time() -> None:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    alone = UsedTwice()
    expected = alone(inputs)

    def work(communicator: Communicator) -> tuple[Tensor, dict[str, Tensor]]:
        model = convert_sync_batch_norm(UsedTwice(), communicator)
        own = model(inputs.chunk(2)[communicator.rank])
        return own.detach(), model.state_dict()

    results = in_process.run(2, work)
    torch.testing.assert_close(torch.cat([own for own, _ in results]), expected.detach())
    for _, state in results:
        torch.testing.assert_close(state, alone.state_dict())


def test_model_may_consist_of_a_single_batch_norm_layer() -> None:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def work(communicator: Communicator) -> Tensor:
        model = convert_sync_batch_norm(nn.BatchNorm1d(3), communicator)
        output: Tensor = model(inputs.chunk(2)[communicator.rank])
        return output.detach()

    whole = torch.cat(in_process.run(2, work))
    torch.testing.assert_close(whole, nn.BatchNorm1d(3)(inputs).detach())


def test_in_place_operation_may_follow_a_layer_without_affine_weights() -> None:
    inputs = torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)

    def gradient(layer: nn.Module, own: Tensor) -> Tensor:
        leaf = own.clone().requires_grad_()
        model = nn.Sequential(layer, nn.ReLU(inplace=True))
        (model(leaf) * weights).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def work(communicator: Communicator) -> Tensor:
        layer = convert_sync_batch_norm(nn.BatchNorm1d(3, affine=False).double(), communicator)
        return gradient(layer, inputs.chunk(2)[communicator.rank])

    expected = gradient(nn.BatchNorm1d(3, affine=False).double(), inputs)
    torch.testing.assert_close(torch.cat(in_process.run(2, work)), expected)
