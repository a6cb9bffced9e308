"""A strategy of your own on one page. From the folder of this file:

    paceline train --strategy own_strategy:LateAveraging -o every=4 --nproc-per-node 2

Each worker trains on its own share of the batches, and every few updates all of them go on from the
mean of their weights: a fraction of the communication, at the price of replicas that differ in
between. (paceline has this as `local_sgd`, with more care; here is the idea alone.)
"""

import torch

from paceline.strategies.strategy import Strategy


class LateAveraging(Strategy):
    replicas_equal = False  # between two averages the workers' weights differ

    def __init__(self, *, every: int = 8) -> None:
        """Keyword arguments are the `-o` options, converted by their types."""
        self.every = every
        self.steps = 0

    def step(self) -> None:
        """After the backward pass of this worker's part of a batch: update, and keep in step."""
        # Gradients come weighted with the part's share of the batch, so that their sum over the
        # workers is the batch's. Alone, a worker's own mean is wanted, so its weight is undone.
        if self.replica.batch_fraction:
            for weight in self.replica.trainable:
                if weight.grad is not None:
                    weight.grad /= self.replica.batch_fraction
        self.replica.update()
        self.steps += 1
        if self.steps % self.every == 0:
            self._average()

    def finish(self) -> None:
        """Once, after training: every worker must end with the same weights."""
        self._average()

    def _average(self) -> None:
        workers = self.replica.communicator
        weights = [weight.data for weight in self.replica.trainable]
        flat = torch.cat([weight.flatten() for weight in weights])
        with self.replica.exposed_communication():  # what follows is counted as communication
            workers.all_reduce(flat, "parameters").wait()
        flat /= workers.world_size
        means = flat.split([weight.numel() for weight in weights])
        for weight, mean in zip(weights, means, strict=True):
            weight.copy_(mean.view_as(weight))
