"""For a user's own training loop: shards batches, synchronizes replicas and measures time.

`paceline.join` (launch/join.py) connects the workers and gives each of them a `Session`.
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
from paceline.strategies.replica import Replica, agree_on_buffers
from paceline.strategies.strategy import StepMeter, Strategy
from paceline.training.coordination import StepCoordinator
from paceline.training.rank_report import account_of
from paceline.training.steady import SteadyPhases

Samples = Dataset[Any] | Sequence[Tensor]
"""A map-style dataset, or tensors such as (inputs, labels): the first dimension counts samples."""


class Session:
    """This worker and the others, as a user's own loop sees them."""

    def __init__(
        self,
        config: RunConfig,
        place: RankInfo,
        communicator: Communicator,
        strategy: Strategy,
        device: torch.device,
    ) -> None:
        self.rank = place.rank
        self.world_size = place.world_size
        self.is_first = place.rank == 0
        """For what only one worker should do, such as printing or saving."""
        self.communicator = communicator
        self.device = device
        """Where this worker computes; `prepare` moves the model there, and batches come there."""
        self._config = config
        self._place = place
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
        """Bring all workers to the first one's weights; use what is returned. Collective.

        `batch_size` samples over all workers make an update; each worker is dealt its share.
        """
        if self._replica is not None:
            raise UsageError("team.prepare: can be called once only; join again for another model")
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
            node=self._place.node_rank,
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
        """The backward pass of the mean loss over this worker's batch, once for each batch.

        The loss is weighted by the batch's share of the global one, so that the workers' gradients
        add up to those of the mean over all samples, however many each of them has.
        """
        if self._replica is None:
            raise UsageError("team.backward: call team.prepare first")
        self._clock.enter("backward")
        self._strategy.backward(loss * self._replica.batch_fraction)
        self._clock.enter("other")

    def step(self) -> None:
        """Synchronize and update the weights; instead of the optimizer's `step` and `zero_grad`."""
        self._strategy.step()
        batches = self._batches
        seconds = self._clock.end_step("other") - batches.dealt
        self._samples += batches.own_samples
        self._coordinator.after_step(seconds, batches.own_samples, stop=False)
        self._steady.first_done(self._meter.settle)

    def finish(self) -> None:
        """Leave the final weights on every worker; `join` calls it at its end. Collective."""
        if self._replica is None:
            return
        self._meter.settle()
        self._coordinator.settle()
        self._steady.end()
        with self._clock.during("exchange"):
            self._strategy.finish()
            agree_on_buffers(self._replica.model, self.communicator, self._config.buffers)

    def account(self) -> dict[str, Any]:
        """Where this worker's time went and what it sent, as in the `workers` of a result.json.

        Waiting is told from communicating about once a second, and at the end.
        """
        if self._replica is None:
            raise UsageError("team.account: call team.prepare first")
        self._clock.enter("other")
        phases = dict(self._clock.seconds)
        laps = self._clock.lap_seconds
        return account_of(
            self._place,
            self._samples,
            phases,
            laps,
            self._replica,
            self._strategy,
            self._steady,
        )


class Batches:
    """This worker's part of each global batch; every pass over it is the next epoch."""

    def __init__(
        self, order: GlobalBatchSampler, replica: Replica, fetch: Callable[[Tensor], Any]
    ) -> None:
        self.epoch = 0
        """The next one to be dealt; may be set."""
        self.dealt = 0.0
        """When the batch at hand was asked for."""
        self.own_samples = 0
        """Those of the batch at hand that count."""
        self._order = order
        self._replica = replica
        self._fetch = fetch

    def __len__(self) -> int:
        return self._order.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        clock = self._replica.clock
        for index in range(len(self)):
            self.dealt = clock.begin_step("input")
            batch = self._fetch(self._deal(epoch, index))
            clock.enter("forward")
            yield batch
        clock.enter("other")

    def _deal(self, epoch: int, index: int) -> Tensor:
        communicator = self._replica.communicator
        samples = self._order.batch(epoch, index)
        equal = [1.0] * communicator.world_size
        part, self.own_samples = rank_shard(len(samples), equal, communicator.rank)
        self._replica.begin_batch(self.own_samples, len(samples))
        return samples[part]


class _Wrapped(nn.Module):
    """The user's model, called as the strategy wants it."""

    def __init__(self, model: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._call = forward

    def forward(self, inputs: Tensor) -> Tensor:
        return self._call(inputs)


def _fetching(dataset: Samples, device: torch.device) -> tuple[Callable[[Tensor], Any], int]:
    """A function from the numbers of samples to a batch, and how many samples there are."""
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
    if isinstance(tensors, Sequence):
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1:
            raise UsageError("dataset: the tensors must have the same number of samples")
        return lambda chosen: tuple(each[chosen].to(device) for each in tensors), lengths.pop()
    if not hasattr(dataset, "__len__"):
        raise UsageError("dataset: must have a length; an iterable one has no order to be dealt in")

    def fetch(chosen: Tensor) -> Any:
        return _moved(default_collate([dataset[number] for number in chosen.tolist()]), device)

    return fetch, len(dataset)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, list | tuple):
        return [_moved(each, device) for each in batch]
    if isinstance(batch, dict):
        return {name: _moved(each, device) for name, each in batch.items()}
    return batch
