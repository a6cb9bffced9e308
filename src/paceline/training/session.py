"""Data-parallel training in a user's own loop: batch shards, synchronization and measurement.

`paceline.join` (launch/join.py) connects the workers and returns a `Session` to each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset, default_collate

from paceline.comm.communicator import Communicator
from paceline.comm.rank_info import RankInfo
from paceline.config import RunConfig
from paceline.data.sampling import GlobalBatchSampler, rank_shard
from paceline.errors import UsageError
from paceline.measure.phase_clock import PhaseClock, clock_for
from paceline.strategies.replica import Replica, synchronize_buffers
from paceline.strategies.strategy import StepMeter, Strategy
from paceline.training.coordination import StepCoordinator
from paceline.training.rank_report import account_of
from paceline.training.steady import SteadyPhases

Samples = Dataset[Any] | Sequence[Tensor]
"""A map-style dataset, or tensors such as (inputs, labels) whose first dimension is the sample."""


class Session:
    """One worker of a user's own training loop."""

    def __init__(
        self,
        config: RunConfig,
        rank_info: RankInfo,
        communicator: Communicator,
        strategy: Strategy,
        device: torch.device,
    ) -> None:
        self.rank = rank_info.rank
        self.world_size = rank_info.world_size
        self.is_first = rank_info.rank == 0
        """Whether this is rank 0, for work that only one worker should do, such as saving."""
        self.communicator = communicator
        self.device = device
        """The device of this worker; `prepare` moves the model to it, and batches are on it."""
        self._config = config
        self._rank_info = rank_info
        self._strategy = strategy
        self._clock = clock_for(device, PhaseClock())
        self._replica: Replica | None = None
        self._samples = 0

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Samples,
        *,
        batch_size: int,
        seed: int = 0,
    ) -> tuple[nn.Module, Optimizer, Batches]:
        """Start all workers from rank 0's weights; use the returned objects. Collective.

        `batch_size` is the global batch size; each worker gets a shard of each batch.
        """
        if self._replica is not None:
            raise UsageError("team.prepare: can be called only once; join again for another model")
        fetch, samples = _fetching(dataset, self.device)
        if not self.world_size <= batch_size <= samples:
            raise UsageError(
                f"batch_size: must be {self.world_size} (workers) to {samples} (samples),"
                f" got {batch_size}"
            )
        model = model.to(self.device)
        replica = self._replica = Replica(
            model=model,
            optimizer=optimizer,
            clock=self._clock,
            forward=model,
            scaler=torch.amp.GradScaler(self.device.type, enabled=False),
            communicator=self.communicator,
            node=self._rank_info.node_rank,
        )
        self._strategy.setup(replica)
        self._meter = self._strategy.meter or StepMeter()
        self._coordinator = StepCoordinator(self._config, self._strategy, replica)
        self._coordinator.start()
        self._steady = SteadyPhases(self._clock, replica)
        self._batches = Batches(GlobalBatchSampler(samples, batch_size, seed), replica, fetch)
        is_wrapped = replica.forward is not model
        return (
            _Wrapped(model, replica.forward) if is_wrapped else model,
            replica.optimizer,
            self._batches,
        )

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of this worker's mean loss; call it once per batch.

        The loss is weighted by this worker's fraction of the global batch, so that the sum of all
        gradients is the gradient of the mean over the global batch.
        """
        if self._replica is None:
            raise UsageError("team.backward: call team.prepare first")
        self._clock.enter("backward")
        self._strategy.backward(loss * self._replica.batch_fraction)
        self._clock.enter("other")

    def step(self) -> None:
        """Synchronize and update the weights; replaces `step` and `zero_grad` of the optimizer."""
        self._strategy.step()
        batches = self._batches
        seconds = self._clock.end_step("other") - batches.began
        self._samples += batches.own_samples
        self._coordinator.after_step(seconds, batches.own_samples, stop=False)
        self._steady.first_done(self._meter.settle)

    def finish(self) -> None:
        """Leave the final weights on every worker; `join` calls it at the end. Collective."""
        if self._replica is None:
            return
        self._meter.settle()
        self._coordinator.settle()
        self._steady.end()
        with self._clock.during("exchange"):
            self._strategy.synchronize()
            self._strategy.finish()
            synchronize_buffers(self._replica.model, self.communicator, self._config.buffers)

    def account(self) -> dict[str, Any]:
        """Return time by phase and traffic of this worker, as in `workers` of result.json.

        Waiting is separated from communication about once per second, and at the end.
        """
        if self._replica is None:
            raise UsageError("team.account: call team.prepare first")
        self._clock.enter("other")
        phases = dict(self._clock.seconds)
        step_seconds = self._clock.step_seconds
        return account_of(
            self._rank_info,
            self._samples,
            phases,
            step_seconds,
            self._replica,
            self._strategy,
            self._steady,
        )


class Batches:
    """This worker's shard of each global batch; each iteration over it is one epoch."""

    def __init__(
        self, order: GlobalBatchSampler, replica: Replica, fetch: Callable[[Tensor], Any]
    ) -> None:
        self.epoch = 0
        """The next epoch; may be set."""
        self.began = 0.0
        """When the current batch was requested."""
        self.own_samples = 0
        """Number of samples in this worker's shard of the current batch."""
        self._order = order
        self._replica = replica
        self._fetch = fetch

    def __len__(self) -> int:
        return self._order.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        clock = self._replica.clock
        for index in range(len(self)):
            self.began = clock.begin_step("input")
            batch = self._fetch(self._shard(epoch, index))
            clock.enter("forward")
            yield batch
        clock.enter("other")

    def _shard(self, epoch: int, index: int) -> Tensor:
        communicator = self._replica.communicator
        samples = self._order.batch(epoch, index)
        equal = [1.0] * communicator.world_size
        part, self.own_samples = rank_shard(len(samples), equal, communicator.rank)
        self._replica.begin_batch(self.own_samples, len(samples))
        return samples[part]


class _Wrapped(nn.Module):
    """The user's model, called through the wrapper of the strategy."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._call = forward

    def forward(self, *inputs: Any, **targets: Any) -> Any:
        return self._call(*inputs, **targets)


def _fetching(dataset: Samples, device: torch.device) -> tuple[Callable[[Tensor], Any], int]:
    """Return a function from sample indices to a batch, and the number of samples."""
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
    if isinstance(tensors, Sequence):
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1:
            raise UsageError("dataset: the tensors must have the same number of samples")
        return lambda chosen: tuple(each[chosen].to(device) for each in tensors), lengths.pop()
    if not hasattr(dataset, "__len__"):
        raise UsageError("dataset: must have a length; iterable datasets are not supported")

    def fetch(chosen: Tensor) -> Any:
        return _to_device(default_collate([dataset[number] for number in chosen.tolist()]), device)

    return fetch, len(dataset)


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, list | tuple):
        return [_to_device(each, device) for each in batch]
    if isinstance(batch, dict):
        return {name: _to_device(each, device) for name, each in batch.items()}
    return batch
