"""Local SGD: every worker trains on its own, and now and then they take the mean.

After each `every` steps weights and optimizer state (momentum, Adam's moments) become the mean over
the workers, which costs one all-reduce instead of `every` of them. With `every=1` and SGD that is
what averaging gradients gives, up to rounding, since an update of SGD is linear in the gradient.
Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-batches, Use Local SGD" (2018), advise to begin
with ordinary synchronous steps: `warmup` of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.cost import Cost, Network
from paceline.config import RunConfig
from paceline.config.conversion import check_option
from paceline.strategies.flat_buffer import FlatGradients
from paceline.strategies.gradient_averaging import KIND
from paceline.strategies.periodic import PeriodicSync, optimizer_tensors, spread
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import ModelShape


class LocalSgd(PeriodicSync):
    def __init__(self, *, every: int = 8, warmup: int = 0, algorithm: str = "library") -> None:
        check_option("every", every, minimum=1, maximum=10**9)
        check_option("warmup", warmup, minimum=0, maximum=10**9)
        super().__init__(algorithm)
        self._every, self._warmup = every, warmup

    def check(self, config: RunConfig) -> list[str]:
        # A worker that skips an update has another number of them behind it than its peers.
        is_fp16 = config.precision == "fp16"
        return ["--precision fp16: strategy local_sgd cannot use it; use bf16"] if is_fp16 else []

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        self._gradients = FlatGradients(replica.trainable)
        replica.flat_gradients = self._gradients.tensor

    def backward(self, loss: Tensor) -> None:
        if self._steps < self._warmup:
            self.replica.backward(loss)
        else:
            super().backward(loss)

    def step(self) -> None:
        if self._steps < self._warmup:
            with self.replica.exposed_communication():
                self._sum(self._gradients.tensor, KIND)
            self.replica.update()
            self._steps += 1
            return
        self.replica.update()
        self._steps += 1
        self._diverged = True
        if (self._steps - self._warmup) % self._every == 0:
            with self.replica.exposed_communication():
                self.outer_step()

    def finish(self) -> None:
        if self._diverged:
            self.outer_step()

    def outer_step(self) -> None:
        state = optimizer_tensors(self.replica.optimizer)
        tensors = [self._weights.tensor, *state]
        flat = self._mean(torch.cat([tensor.flatten() for tensor in tensors]))
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, part in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))
        self._diverged = False

    def global_weights(self) -> Tensor:
        return self._mean(self._weights.tensor.clone())

    def _mean(self, tensor: Tensor) -> Tensor:
        return self._sum(tensor).div_(self.replica.communicator.world_size)

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """Of weights and as large a momentum; of an exchange, spread over the steps between two."""
        whole = self.algorithm.cost(shape.workers, 2 * shape.gradient_bytes, network)
        return spread(whole, self._every)
