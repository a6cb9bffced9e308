"""What one server holds: a contiguous part of the flat weights, and the optimiser of that part.

SGD and Adam treat every element by itself, so the parts together do what one optimiser of all
weights does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.sync.strategy import MakeOptimizer

State = dict[str, Tensor | float | None]
"""Of an optimiser, for one flat tensor: one like the weights, a count, or nothing yet."""

TENSOR = "tensor"
"""Stands for a tensor where a state is described."""


class Shard:
    def __init__(self, weights: Tensor, make_optimizer: MakeOptimizer) -> None:
        self._parameter = nn.Parameter(weights)
        self._optimizer = make_optimizer(self._parameter)
        self.updates = 0

    @property
    def weights(self) -> Tensor:
        return self._parameter.detach()

    def apply(self, gradient: Tensor, rate: float) -> None:
        """One update; the gradient may be used up."""
        self._parameter.grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.updates += 1

    def state(self) -> State:
        values = self._optimizer.state.get(self._parameter, {})
        return {
            name: float(value) if isinstance(value, Tensor) and value.dim() == 0 else value
            for name, value in values.items()
        }

    def load_state(self, state: State) -> None:
        values = {
            name: torch.tensor(value) if isinstance(value, float) else value
            for name, value in state.items()
        }
        settings = self._optimizer.state_dict()["param_groups"]
        own = {0: values} if values else {}
        self._optimizer.load_state_dict({"state": own, "param_groups": settings})


def described(state: State) -> dict[str, float | str | None]:
    """As JSON can hold it; the tensors follow it in the same order."""
    return {name: TENSOR if isinstance(value, Tensor) else value for name, value in state.items()}
