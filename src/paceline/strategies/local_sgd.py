"""Local SGD: ranks train independently and periodically average their weights.

Every `every` steps, an all-reduce replaces weights and optimizer state (momentum, Adam's moments)
with their mean over all ranks. With `every=1` and SGD, this equals gradient averaging up to
rounding, because an SGD update is linear in the gradient.

Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-batches, Use Local SGD" (2018), recommend
starting with synchronous steps; `warmup` is their number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.cost import Cost, Network
from paceline.config import RunConfig
from paceline.config.conversion import check_option
from paceline.strategies.flat_buffer import FlatBuffer
from paceline.strategies.gradient_averaging import KIND
from paceline.strategies.periodic import PeriodicSync, amortize, optimizer_tensors
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import ModelShape


class LocalSgd(PeriodicSync):
    outer_step_equalizes = True

    def __init__(self, *, every: int = 8, warmup: int = 0, algorithm: str = "library") -> None:
        check_option("every", every, minimum=1, maximum=10**9)
        check_option("warmup", warmup, minimum=0, maximum=10**9)
        super().__init__(algorithm, every, warmup)

    def check(self, config: RunConfig) -> list[str]:
        # The loss scaler may skip a step on a single rank, so that step counts differ.
        is_fp16 = config.precision == "fp16"
        return (
            ["--precision fp16: not supported by strategy local_sgd; use bf16"] if is_fp16 else []
        )

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        self._gradients = FlatBuffer(replica.trainable)
        self._gradients.hold_gradients()
        replica.flat_gradients = self._gradients.tensor

    def reduce_gradients(self) -> None:
        self._sum(self._gradients.tensor, KIND)

    def outer_step(self) -> None:
        state = optimizer_tensors(self.replica.optimizer)
        tensors = [self._weights.tensor, *state]
        flat = self._mean(torch.cat([tensor.flatten() for tensor in tensors]))
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, mean in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(mean.view(tensor.shape))

    def global_weights(self) -> Tensor:
        return self._mean(self._weights.tensor.clone())

    def finish(self) -> None:
        if self._diverged:
            self.outer_step()
            self._diverged = False

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """Return the amortized cost of averaging weights and a momentum of equal size."""
        outer_step = self.algorithm.cost(shape.workers, 2 * shape.gradient_bytes, network)
        return amortize(outer_step, self._every)

    def _mean(self, tensor: Tensor) -> Tensor:
        return self._sum(tensor).div_(self.replica.communicator.world_size)
