"""The batches of a user's own training loop, with their time measured as input.

Either a dataset that paceline shards, or batches that each worker brings itself, from a DataLoader
or any other iterable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from paceline.comm.work import Work
from paceline.data.sampling import GlobalBatchSampler, rank_shard
from paceline.errors import UsageError
from paceline.strategies.replica import Replica

Samples = Dataset[Any] | Sequence[Tensor]
"""A map-style dataset, or tensors such as (inputs, labels) whose first dimension is the sample."""

_END = object()


class Batches(ABC):
    """This worker's part of each global batch; each iteration over it is one epoch."""

    def __init__(self, replica: Replica) -> None:
        self.epoch = 0
        """The next epoch; may be set."""
        self.began = 0.0
        """When the current batch was requested."""
        self.own_samples: int | None = 0
        """Number of samples in this worker's part of the current batch; None if unknown.

        0 for a worker that has none left: it repeats samples, with weight 0.
        """
        self.global_samples: int | None = 0
        """Number of samples in the current batch of all workers; None if unknown."""
        self._replica = replica
        self._current = 0
        """The current epoch, or the next one between two."""
        self._done = 0
        """Batches of the current epoch."""
        self._is_before_forward = False
        """Whether a batch is there and the model has not been called for it."""

    @abstractmethod
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        clock = self._replica.clock
        batches = self._batches(epoch)
        self._current, self._done = epoch, 0
        while True:
            self.began = clock.begin_step("input")
            batch = next(batches, _END)
            if batch is _END:
                break
            clock.enter("other")
            self._announce()
            self._done += 1
            self._is_before_forward = True
            yield batch
        self._current, self._done = epoch + 1, 0
        # The end of the data is not part of an iteration.
        clock.phase = "other"
        clock.enter("other")

    @abstractmethod
    def _batches(self, epoch: int) -> Iterator[Any]:
        """Yield the batches of an epoch; before each, set `own_samples`."""

    def _announce(self) -> None:  # noqa: B027 - as below
        """Tell the other workers about the current batch. Collective."""

    def begin_forward(self) -> None:
        """The model is called: what preceded it is code of the loop."""
        clock = self._replica.clock
        if self._is_before_forward and clock.phase == "other":
            self._is_before_forward = False
            clock.enter("forward")

    def end_forward(self) -> None:
        """The backward pass follows; if the model was not called, the forward pass precedes it."""
        clock = self._replica.clock
        if self._is_before_forward and clock.phase == "other":
            clock.phase = "forward"
        self._is_before_forward = False

    def weigh(self) -> None:  # noqa: B027 - not all need it
        """Set the weight of the current batch in the replica, if it is not set yet. Collective."""

    @property
    def epochs_done(self) -> float:
        """Epochs up to the current batch, with a fraction if the length of an epoch is known."""
        try:
            return self._current + min(1.0, self._done / len(self)) if self._done else self._current
        except TypeError:
            return self._current


class ShardedBatches(Batches):
    """Shards of the global batches of a dataset, in an order that all worker counts share."""

    def __init__(
        self, replica: Replica, dataset: Samples, batch_size: int, seed: int, device: torch.device
    ) -> None:
        super().__init__(replica)
        self._fetch, samples = _fetching(dataset, device)
        world_size = replica.communicator.world_size
        if not world_size <= batch_size <= samples:
            raise UsageError(
                f"batch_size: must be {world_size} (workers) to {samples} (samples),"
                f" got {batch_size}"
            )
        self._order = GlobalBatchSampler(samples, batch_size, seed)

    def __len__(self) -> int:
        return self._order.batches_per_epoch

    def _batches(self, epoch: int) -> Iterator[Any]:
        communicator = self._replica.communicator
        equal = [1.0] * communicator.world_size
        for index in range(len(self)):
            samples = self._order.batch(epoch, index)
            part, self.own_samples = rank_shard(len(samples), equal, communicator.rank)
            self.global_samples = len(samples)
            self._replica.begin_batch(self.own_samples, len(samples))
            yield self._fetch(samples[part])


class OwnBatches(Batches):
    """Batches that each worker brings itself, weighted by their numbers of samples.

    The counts are exchanged during the forward pass, so that the sum of all workers' gradients is
    the gradient of the mean over the samples of all workers. A worker whose batches end before
    those of the others repeats its last batch with weight 0, so that every sample counts once and
    no worker waits for one that has left the loop.
    """

    def __init__(self, replica: Replica, source: Iterable[Any], device: torch.device) -> None:
        super().__init__(replica)
        self._source = source
        self._device = device
        self._last: Any = _END
        self._has_batch = False
        self._counts = torch.zeros(1, dtype=torch.int64)
        """The sum of the packed counts of all workers."""
        self._exchange: Work | None = None

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]  # TypeError says that it has none

    def _batches(self, epoch: int) -> Iterator[Any]:
        if epoch and iter(self._source) is self._source:
            raise UsageError(
                "team.prepare: an iterator can be read only once: pass a DataLoader or another"
                " iterable that can be read in every epoch"
            )
        set_epoch(self._source, epoch)
        for batch in self._source:
            batch = to_device(batch, self._device)
            self._last, self.own_samples = batch, count_samples(batch)
            self._has_batch = True
            yield batch
        self._has_batch = False
        # Agreeing on the end of the data is not input.
        self._replica.clock.phase = "other"
        while self._others_have_batches():
            self.own_samples = 0
            yield self._last

    def _others_have_batches(self) -> bool:
        if self._replica.communicator.world_size == 1:
            return False
        self._exchange_counts(has_batch=False)
        self.weigh()
        has_more = bool(unpack_counts(self._counts).workers)
        if has_more and self._last is _END:
            raise UsageError(
                f"team.prepare: the batches of rank {self._replica.communicator.rank} are empty:"
                " every worker needs at least one batch"
            )
        return has_more

    def _announce(self) -> None:
        # The others know already about a batch that is repeated.
        if self._has_batch:
            self._exchange_counts(has_batch=True)

    def _exchange_counts(self, *, has_batch: bool) -> None:
        """Start the exchange of the sample counts. Collective."""
        replica, samples = self._replica, self.own_samples if has_batch else 0
        replica.set_sample_counts(samples != 0)
        if replica.communicator.world_size == 1:
            return
        # A loop that skipped a batch has not waited for its counts.
        self.weigh()
        self._own = samples, has_batch
        self._counts = pack_counts(samples, has_batch=has_batch)
        self._announced = perf_counter()
        self._exchange = replica.communicator.all_reduce(self._counts, "control")

    def weigh(self) -> None:
        if self._exchange is None:
            return
        with self._replica.exposed_communication(self._announced):
            self._exchange.wait()
        self._exchange = None
        (samples, has_batch), total = self._own, unpack_counts(self._counts)
        if total.uncounted or not total.samples:
            # Equal weights, where a worker cannot tell the number of its samples.
            self._replica.batch_fraction = has_batch / max(total.workers, 1)
            self.global_samples = None
        else:
            self._replica.batch_fraction = (samples or 0) / total.samples
            self.global_samples = total.samples


WORKER_BITS = 14
"""For each number of workers in packed counts: up to 16,383. 35 bits are left for samples."""


class BatchCounts(NamedTuple):
    """The sum over all workers."""

    samples: int
    workers: int
    """Workers that have a batch."""
    uncounted: int
    """Workers that do not know the number of their samples."""


def pack_counts(samples: int | None, *, has_batch: bool) -> Tensor:
    """The counts of one worker as one number, whose sum has the sums of all three.

    Gloo sums one number with fewer messages than three: on two busy cores, waiting for them took
    0.2 ms of a step.
    """
    packed = ((samples or 0) << 2 * WORKER_BITS) | (has_batch << WORKER_BITS) | (samples is None)
    return torch.tensor([packed], dtype=torch.int64)


def unpack_counts(total: Tensor) -> BatchCounts:
    packed, mask = int(total), (1 << WORKER_BITS) - 1
    return BatchCounts(packed >> 2 * WORKER_BITS, (packed >> WORKER_BITS) & mask, packed & mask)


def open_batches(
    replica: Replica,
    data: Samples | Iterable[Any],
    batch_size: int | None,
    seed: int,
    device: torch.device,
) -> Batches:
    """With `batch_size` the shards of a dataset, else batches of this worker itself."""
    is_own = isinstance(data, DataLoader) or not _holds_samples(data)
    if batch_size is not None:
        if is_own and (isinstance(data, DataLoader) or not hasattr(data, "__getitem__")):
            raise UsageError(
                "batch_size: leave it out, or pass a dataset: the batches of a DataLoader or"
                " another iterable have their own size"
            )
        return ShardedBatches(replica, data, batch_size, seed, device)  # type: ignore[arg-type]
    if not is_own:
        raise UsageError(
            "batch_size: missing: give the global batch size of the dataset, or pass a DataLoader"
        )
    if not isinstance(data, Iterable):
        raise UsageError("team.prepare: pass a dataset, a DataLoader or an iterable of batches")
    return OwnBatches(replica, data, device)


def _holds_samples(data: object) -> bool:
    """Whether iteration would yield samples, or tensors of them, instead of batches."""
    if isinstance(data, Dataset | Tensor):
        return True
    if not isinstance(data, list | tuple) or not data:
        return False
    return all(isinstance(each, Tensor) for each in data)


def shard_warning(data: object, world_size: int) -> str | None:
    """A warning if every worker would read all samples of a DataLoader."""
    if world_size == 1 or not isinstance(data, DataLoader):
        return None
    # An exact type: subclasses may shard.
    if type(data.sampler) not in (SequentialSampler, RandomSampler):
        return None
    return (
        f"the DataLoader has no DistributedSampler: each of the {world_size} workers reads all"
        " samples in every epoch"
    )


def set_epoch(source: object, epoch: int) -> None:
    """Tell the samplers of a DataLoader, or the iterable itself, which epoch begins."""
    batch_sampler = getattr(source, "batch_sampler", None)
    for one in (
        source,
        getattr(source, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(source, "dataset", None),
    ):
        if callable(tell := getattr(one, "set_epoch", None)):
            tell(epoch)


def count_samples(batch: Any) -> int | None:
    """The first dimension of the first tensor or array in a batch; None if there is none."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((found for each in batch if (found := count_samples(each)) is not None), None)
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape else None


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on the device; containers keep their types."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=batch.is_pinned())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(each, device) for each in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(each, device) for each in batch)
    if isinstance(batch, dict):
        return {name: to_device(each, device) for name, each in batch.items()}
    return batch.to(device) if hasattr(batch, "to") else batch


def _fetching(dataset: Samples, device: torch.device) -> tuple[Callable[[Tensor], Any], int]:
    """Return a function from sample indices to a batch, and the number of samples."""
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
    if isinstance(tensors, Sequence) and all(isinstance(each, Tensor) for each in tensors):
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1:
            raise UsageError("dataset: the tensors must have the same number of samples")
        return lambda chosen: tuple(each[chosen].to(device) for each in tensors), lengths.pop()
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            "dataset: must have a length; pass a DataLoader of an iterable dataset, without"
            " batch_size"
        )

    def fetch(chosen: Tensor) -> Any:
        return to_device(default_collate([dataset[number] for number in chosen.tolist()]), device)

    return fetch, len(dataset)
