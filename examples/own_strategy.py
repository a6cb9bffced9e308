"""A user-defined strategy. From the folder of this file:

    paceline train --strategy own_strategy:LateAveraging -o every=4 --nproc-per-node 2

Each worker trains on its own shard of the batches, and every few steps all workers average their
weights. This needs a fraction of the communication, but replicas differ between averages. The
built-in strategy `local_sgd` is a complete version of this idea.
"""

import torch

from paceline.strategies.strategy import Strategy


class LateAveraging(Strategy):
    replicas_equal = False  # weights differ between two averages

    def __init__(self, *, every: int = 8) -> None:
        """Keyword arguments are the `-o` options, converted to their types."""
        self.every = every
        self.steps = 0

    def step(self) -> None:
        """Update the weights after the backward pass, and average them periodically."""
        # Gradients are weighted so that their sum over all workers is that of the global batch.
        # A local step needs the mean over the worker's own samples instead.
        if self.replica.batch_fraction:
            for weight in self.replica.trainable:
                if weight.grad is not None:
                    weight.grad /= self.replica.batch_fraction
        self.replica.update()
        self.steps += 1
        if self.steps % self.every == 0:
            self._average()

    def finish(self) -> None:
        """Leave the same weights on every worker after training."""
        self._average()

    def _average(self) -> None:
        communicator = self.replica.communicator
        weights = [weight.data for weight in self.replica.trainable]
        flat = torch.cat([weight.flatten() for weight in weights])
        with self.replica.exposed_communication():  # counts as communication
            communicator.all_reduce(flat, "parameters").wait()
        flat /= communicator.world_size
        means = flat.split([weight.numel() for weight in weights])
        for weight, mean in zip(weights, means, strict=True):
            weight.copy_(mean.view_as(weight))
