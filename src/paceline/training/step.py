"""One training step: forward and backward passes over microbatches, then the strategy's update.

Losses are weighted by their samples' fraction of the global batch. The sum of all ranks' gradients
is therefore the gradient of the mean loss over the global batch, for any split into shards and
microbatches.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.config import RunConfig
from paceline.data.pipeline import InputPipeline
from paceline.data.sampling import rank_shard
from paceline.measure.memory import WorkerMemory
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy
from paceline.training.coordination import StepCoordinator
from paceline.training.gpu.cuda_graph import GraphCache
from paceline.training.loss import loss_of
from paceline.training.optimizer import learning_rate, set_learning_rate


@dataclass(frozen=True, slots=True)
class _Work:
    """What a step computes, apart from the values of its samples and weights."""

    global_samples: int
    shards: tuple[tuple[int, int, int], ...]
    """Of each part of the global batch that is gathered: begin, end, and how many samples count."""
    microbatches: int
    """Into which this rank's samples are split, if there is one shard."""

    @property
    def samples(self) -> int:
        """Samples of this rank that count."""
        return sum(counted for _, _, counted in self.shards)


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
        memory: WorkerMemory,
        graphs: GraphCache | None = None,
    ) -> None:
        """With `graphs`, steps are captured and replayed."""
        self.replica = replica
        self.strategy = strategy
        self.batches_per_epoch = pipeline.order.batches_per_epoch
        self.learning_rate = 0.0
        """Of the last step."""
        self._optimizer_rate: float | None = None
        self._pipeline = pipeline
        self._coordinator = coordinator
        self._autocast = autocast
        self.memory = memory
        self._graphs = graphs
        self._clock = replica.clock
        self._schedule = learning_rate(config, self.batches_per_epoch)
        self._accumulate = config.accumulate
        self._loss = loss_of(replica.model, config.label_smoothing)
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
        rate = self._schedule(iteration)
        if rate != self._optimizer_rate:
            # On a GPU, this launches a kernel.
            set_learning_rate(self.replica.optimizer, rate)
        self.learning_rate = self._optimizer_rate = rate
        self._pipeline.seek(epoch, index)
        work = self._split(self._pipeline.order.batch_samples(index), shard)
        samples = work.samples
        if self._is_alone:
            samples = -(-samples // work.microbatches)  # Of the first, as `tensor_split` has it.
        is_measured = self.replica.noise.begin_step(iteration, samples, work.global_samples)
        if self._graphs is None:
            return self._update(work), work.samples
        key = work, is_measured, self.strategy.capture_key()
        return self._graphs.run(key, lambda: self._update(work)), work.samples

    def compute(self, inputs: Tensor, targets: Tensor, weight: float = 1.0) -> Tensor:
        """Run the forward and backward pass of one microbatch and return its mean loss.

        `weight` is the microbatch's fraction of the global batch.
        """
        began = self._clock.enter("forward")
        with self._autocast:
            loss = self._loss(self.replica.forward, inputs, targets)
        if self.memory.is_sampling:
            self.memory.sample("forward")
        if self._slowdown:
            self._emulate_slow_rank(began)
        turned = self._clock.enter("backward")
        self.strategy.backward(loss if weight == 1.0 else loss * weight)
        if self._slowdown:
            self._backward_seconds = self._clock.arrive("other") - turned
        return loss.detach()

    def _split(self, global_samples: int, shard: int) -> _Work:
        """Return this rank's work on a global batch.

        Usually the batch is split into shards, and this rank's shard into microbatches. With layers
        that communicate, the batch is split into microbatches, and each of them into shards: these
        layers then see the statistics of the same microbatches as one worker does.
        """
        microbatches = min(self._accumulate, global_samples)
        if self._is_alone:
            return _Work(global_samples, ((0, global_samples, global_samples),), microbatches)
        shares = self._coordinator.shares
        if not self._has_sync_layers or microbatches == 1:
            rows, samples = rank_shard(global_samples, shares, shard)
            shards = ((rows.start, rows.stop, samples),)
            return _Work(global_samples, shards, min(self._accumulate, rows.stop - rows.start))
        # Sizes as `tensor_split` has them.
        size, rest = divmod(global_samples, microbatches)
        parts, begin = [], 0
        for number in range(microbatches):
            length = size + (number < rest)
            rows, samples = rank_shard(length, shares, shard)
            parts.append((begin + rows.start, begin + rows.stop, samples))
            begin += length
        return _Work(global_samples, tuple(parts), 1)

    def _update(self, work: _Work) -> Tensor:
        """Gather the samples, compute gradients and update the weights; return the mean loss.

        Apart from `work`, its operations must not depend on values of the program, so that they can
        be captured.
        """
        noise = self.replica.noise
        self.replica.begin_batch(work.samples, work.global_samples)
        compute = self._compute_local if len(work.shards) == 1 else self._compute_global
        loss = compute(work)
        if self.memory.is_sampling:
            self.memory.sample("backward")
        if noise.wants_own and not self.strategy.reports_own_gradients:
            noise.add_own(self.replica.gradients())
        self.strategy.step()
        if noise.is_measuring:
            noise.end_step()
        if self.memory.is_sampling:
            self.memory.sample("update")
        return loss

    def _compute_local(self, work: _Work) -> Tensor:
        ((begin, end, samples),) = work.shards
        is_whole = end - begin == work.global_samples
        inputs, targets = self._pipeline.gather(None if is_whole else slice(begin, end))
        count = work.microbatches
        if count == 1:
            return self.compute(inputs, targets, samples / work.global_samples)
        total: Tensor | float = 0.0
        microbatches = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        for number, (inputs, targets) in enumerate(microbatches, 1):
            self.replica.is_last_microbatch = number == count
            loss = self.compute(inputs, targets, len(targets) / work.global_samples)
            if number == 1 and self._is_alone and self.replica.noise.is_measuring:
                # Later microbatches add to these gradients.
                self.replica.noise.add_own(self.replica.gradients())
            total = total + loss * (len(targets) / (end - begin))
        assert isinstance(total, Tensor)
        return total

    def _compute_global(self, work: _Work) -> Tensor:
        total: Tensor | float = 0.0
        for number, (begin, end, samples) in enumerate(work.shards, 1):
            self._clock.enter("input")
            inputs, targets = self._pipeline.gather(slice(begin, end))
            self.replica.set_sample_counts(samples > 0)
            self.replica.is_last_microbatch = number == len(work.shards)
            loss = self.compute(inputs, targets, samples / work.global_samples)
            total = total + loss * samples
        assert isinstance(total, Tensor)
        return total / work.samples if work.samples else loss

    def _emulate_slow_rank(self, began: float) -> None:
        """Sleep for --slow, before the backward pass may begin to communicate."""
        computed = self._clock.arrive("forward") - began + self._backward_seconds
        time.sleep(self._slowdown * computed)
