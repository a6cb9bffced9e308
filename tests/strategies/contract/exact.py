"""A model whose gradients are exact in float32 for any order of summation.

Its output is linear in the weights and its inputs are small integers, so a gradient is an integer
divided by the batch size. If batch sizes, learning rates and decays are powers of two, nothing is
rounded: every correct summation gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

INPUTS = 6


class ExactModel(nn.Module):
    """Weights with zero, one, a prime number of and many elements; strided, frozen and unused."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(_whole((1,), generator))
        self.prime = nn.Parameter(_whole((31,), generator))
        self.large = nn.Parameter(_whole((1009,), generator))
        kernel = _whole((4, 3, 2, 2), generator)
        self.kernel = nn.Parameter(kernel.contiguous(memory_format=torch.channels_last))
        self.frozen = nn.Parameter(_whole((7,), generator), requires_grad=False)
        self.seldom = nn.Parameter(_whole((5,), generator)) if unused else None
        """Contributes to the loss only for some samples."""
        self.never = nn.Parameter(_whole((3,), generator)) if unused else None
        weights = (self.one, self.prime, self.large, self.kernel, self.frozen)
        for number, weight in enumerate(weights):
            self.register_buffer(f"mix{number}", _whole((INPUTS, weight.numel()), generator))

    def forward(self, inputs: Tensor) -> Tensor:
        weights = (self.one, self.prime, self.large, self.kernel, self.frozen)
        total = inputs.new_zeros(len(inputs)) + self.empty.sum()
        for number, weight in enumerate(weights):
            total = total + inputs @ self.get_buffer(f"mix{number}") @ weight.flatten()
        if self.seldom is not None:
            asked = inputs[:, :5].clamp(min=0)
            if asked.any():
                total = total + asked @ self.seldom
        return total


def exact_batch(step: int, samples: int) -> Tensor:
    """Return integers from -2 to 2; odd steps do not use `ExactModel.seldom`."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = _whole((samples, INPUTS), generator)
    if step % 2:
        inputs[:, :5] = -inputs[:, :5].abs()
    return inputs


def _whole(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, shape, generator=generator).float()
