"""Elastic averaging SGD: an elastic force keeps each rank near common center weights.

Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD" (2015), in its synchronous
form. Each rank i trains its own weights x_i. Every `tau` steps, the weights move toward the center
c and the center moves toward all weights:

    d_i = x_i - c        x_i <- x_i - alpha d_i        c <- c + alpha (d_1 + ... + d_W)

The moving rate `alpha` defaults to 0.9 / W. Evaluation and the final model use the center. Every
rank keeps a copy of it and adds the same sum, so the copies are equal bit for bit. Each rank has
its own optimizer state.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.comm.cost import Cost, Network
from paceline.config.conversion import check_option
from paceline.strategies.periodic import PeriodicSync, amortize
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import ModelShape

MOVING_RATE = 0.9
"""Default moving rate of the center, summed over all ranks."""


class Easgd(PeriodicSync):
    def __init__(
        self, *, tau: int = 6, alpha: float | None = None, algorithm: str = "library"
    ) -> None:
        check_option("tau", tau, minimum=1, maximum=10**9)
        if alpha is not None:
            check_option("alpha", alpha, above=0, maximum=1)
        super().__init__(algorithm, every=tau)
        self._alpha_option = alpha

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        self._alpha = self._alpha_option or MOVING_RATE / replica.communicator.world_size
        self._center = self._weights.tensor.clone()

    def outer_step(self) -> None:
        difference = self._weights.tensor - self._center
        self._weights.tensor.sub_(difference, alpha=self._alpha)
        self._center.add_(self._sum(difference), alpha=self._alpha)

    def global_weights(self) -> Tensor:
        return self._center

    def reset_global_weights(self) -> None:
        self._center.copy_(self._weights.tensor)

    def finish(self) -> None:
        self._weights.tensor.copy_(self._center)
        self._diverged = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "centre": self._center}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._center.copy_(state["centre"])

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """Return the amortized cost of the outer step."""
        outer_step = self.algorithm.cost(shape.workers, shape.gradient_bytes, network)
        return amortize(outer_step, self._every)
