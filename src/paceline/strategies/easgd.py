"""Elastic averaging SGD: every worker on a spring to a common centre.

Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD" (2015), in its synchronous
form. Each worker i trains its own weights x_i. After each `tau` steps it is pulled towards the
centre c, and the centre towards all of them:

    d_i = x_i - c        x_i <- x_i - alpha d_i        c <- c + alpha (d_1 + ... + d_W)

The moving rate `alpha` is 0.9 / W by default. The centre is what is evaluated and what remains at
the end; it is kept by every worker, and since all add the same sum, theirs are equal bit for bit.
Optimiser state stays each worker's own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.comm.cost import Cost, Network
from paceline.config.conversion import check_option
from paceline.strategies.periodic import PeriodicSync, spread
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import ModelShape

MOVING_RATE = 0.9
"""Of the centre, for all workers together."""


class Easgd(PeriodicSync):
    def __init__(
        self, *, tau: int = 6, alpha: float | None = None, algorithm: str = "library"
    ) -> None:
        check_option("tau", tau, minimum=1, maximum=10**9)
        if alpha is not None:
            check_option("alpha", alpha, above=0, maximum=1)
        super().__init__(algorithm)
        self._tau, self._given_alpha = tau, alpha

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        self._alpha = self._given_alpha or MOVING_RATE / replica.communicator.world_size
        self._centre = self._weights.tensor.clone()

    def reset_global_weights(self) -> None:
        self._centre.copy_(self._weights.tensor)

    def step(self) -> None:
        super().step()
        self._steps += 1
        self._diverged = True
        if self._steps % self._tau == 0:
            with self.replica.exposed_communication():
                self._pull()

    def _pull(self) -> None:
        difference = self._weights.tensor - self._centre
        self._weights.tensor.sub_(difference, alpha=self._alpha)
        self._centre.add_(self._sum(difference), alpha=self._alpha)

    def finish(self) -> None:
        self._weights.tensor.copy_(self._centre)
        self._diverged = False

    def global_weights(self) -> Tensor:
        return self._centre

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "centre": self._centre}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._centre.copy_(state["centre"])

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """Of an exchange, spread over the steps between two."""
        return spread(self.algorithm.cost(shape.workers, shape.gradient_bytes, network), self._tau)
