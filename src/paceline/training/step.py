"""One training step: forward and backward passes over microbatches, then the strategy's update.

Losses are weighted by their samples' fraction of the global batch. The sum of all ranks' gradients
is therefore the gradient of the mean loss over the global batch, for any split into shards and
microbatches.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from paceline.config import RunConfig
from paceline.data.pipeline import InputPipeline
from paceline.data.sampling import rank_shard
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy
from paceline.training.coordination import StepCoordinator
from paceline.training.loss import cross_entropy
from paceline.training.optimizer import learning_rate, set_learning_rate


class TrainStep:
    """Updates the weights once per call."""

    def __init__(
        self,
        config: RunConfig,
        replica: Replica,
        strategy: Strategy,
        pipeline: InputPipeline,
        coordinator: StepCoordinator,
        autocast: AbstractContextManager[Any],
    ) -> None:
        self.replica = replica
        self.strategy = strategy
        self.batches_per_epoch = pipeline.order.batches_per_epoch
        self.learning_rate = 0.0
        """Of the last step."""
        self._pipeline = pipeline
        self._coordinator = coordinator
        self._autocast = autocast
        self._clock = replica.clock
        self._schedule = learning_rate(config, self.batches_per_epoch)
        self._accumulate = config.accumulate
        self._label_smoothing = config.label_smoothing
        world_size = replica.communicator.world_size
        self._is_alone = world_size == 1
        self._has_sync_layers = config.sync_bn and world_size > 1
        self._slowdown = config.slowness(replica.communicator.rank) - 1.0
        self._backward_seconds = 0.0

    def __call__(self, iteration: int, shard: int) -> tuple[Tensor, int]:
        """Train on one shard of a global batch.

        Returns the mean loss of the shard's samples, and their number.
        """
        epoch, index = divmod(iteration, self.batches_per_epoch)
        global_samples = self._pipeline.order.batch_samples(index)
        self.learning_rate = self._schedule(iteration)
        set_learning_rate(self.replica.optimizer, self.learning_rate)
        if self._has_sync_layers and min(self._accumulate, global_samples) > 1:
            loss, samples = self._accumulate_global(epoch, index, global_samples, shard)
        else:
            loss, samples = self._accumulate_local(epoch, index, global_samples, shard)
        self.strategy.step()
        return loss, samples

    def compute(self, inputs: Tensor, targets: Tensor, weight: float = 1.0) -> Tensor:
        """Run the forward and backward pass of one microbatch and return its mean loss.

        `weight` is the microbatch's fraction of the global batch.
        """
        began = self._clock.enter("forward")
        with self._autocast:
            loss = cross_entropy(
                self.replica.forward(inputs), targets, label_smoothing=self._label_smoothing
            )
        if self._slowdown:
            self._emulate_slow_rank(began)
        turned = self._clock.enter("backward")
        self.strategy.backward(loss if weight == 1.0 else loss * weight)
        if self._slowdown:
            self._backward_seconds = self._clock.arrive("other") - turned
        return loss.detach()

    def _accumulate_local(
        self, epoch: int, index: int, global_samples: int, shard: int
    ) -> tuple[Tensor, int]:
        """Split the batch into shards, and this rank's shard into microbatches."""
        rows, samples = None, global_samples
        if not self._is_alone:
            rows, samples = rank_shard(global_samples, self._coordinator.shares, shard)
        self.replica.begin_batch(samples, global_samples)
        inputs, targets = self._pipeline.batch(epoch, index, rows)
        count = min(self._accumulate, len(targets))
        if count == 1:
            return self.compute(inputs, targets, samples / global_samples), samples
        total: Tensor | float = 0.0
        microbatches = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        computed = len(targets)
        for number, (inputs, targets) in enumerate(microbatches, 1):
            self.replica.is_last_microbatch = number == count
            loss = self.compute(inputs, targets, len(targets) / global_samples)
            total = total + loss * (len(targets) / computed)
        assert isinstance(total, Tensor)
        return total, samples

    def _accumulate_global(
        self, epoch: int, index: int, global_samples: int, shard: int
    ) -> tuple[Tensor, int]:
        """Split the batch into microbatches, and each microbatch into shards.

        Layers that communicate then see the statistics of the same microbatches as one worker does.
        """
        count = min(self._accumulate, global_samples)
        shares = self._coordinator.shares
        # Sizes as `tensor_split` has them.
        sizes = [global_samples // count + (i < global_samples % count) for i in range(count)]
        shards = [rank_shard(size, shares, shard) for size in sizes]
        own_samples = sum(samples for _, samples in shards)
        self.replica.begin_batch(own_samples, global_samples)
        total: Tensor | float = 0.0
        begin = 0
        for number, (size, (rows, samples)) in enumerate(zip(sizes, shards, strict=True), 1):
            self._clock.enter("input")
            chosen = slice(begin + rows.start, begin + rows.stop)
            inputs, targets = self._pipeline.batch(epoch, index, chosen)
            self.replica.set_sample_counts(samples > 0)
            self.replica.is_last_microbatch = number == count
            loss = self.compute(inputs, targets, samples / global_samples)
            total = total + loss * samples
            begin += size
        assert isinstance(total, Tensor)
        return total / own_samples if own_samples else loss, own_samples

    def _emulate_slow_rank(self, began: float) -> None:
        """Sleep for --slow, before the backward pass may begin to communicate."""
        computed = self._clock.arrive("forward") - began + self._backward_seconds
        time.sleep(self._slowdown * computed)
