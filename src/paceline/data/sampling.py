"""Order of samples: the composition of each global batch depends only on (seed, epoch).

Global batch `i` of an epoch holds the same samples for any number of workers, and each worker takes
a shard of it. Synchronous strategies therefore compute the same updates as a single worker, and a
run that is resumed or resized still sees each sample exactly once per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class GlobalBatchSampler:
    """Shuffles the dataset anew in each epoch and cuts it into global batches."""

    samples: int
    batch_size: int
    seed: int
    reshuffle: bool = True
    """If False, every epoch repeats the order of the first: a common mistake, kept for studies."""
    _cached: tuple[int, Tensor] | None = field(default=None, repr=False)

    @property
    def batches_per_epoch(self) -> int:
        """Number of global batches; the last one may be smaller, so that no sample is dropped."""
        return -(-self.samples // self.batch_size)

    def permutation(self, epoch: int) -> Tensor:
        """Return the sample indices of an epoch in order."""
        epoch = epoch if self.reshuffle else 0
        if self._cached is None or self._cached[0] != epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
            self._cached = (epoch, torch.randperm(self.samples, generator=generator))
        return self._cached[1]

    def batch_samples(self, index: int) -> int:
        """Return the size of global batch `index` of an epoch."""
        return min(self.batch_size, self.samples - index * self.batch_size)

    def batch(self, epoch: int, index: int) -> Tensor:
        """Return the sample indices of global batch `index` of an epoch."""
        start = index * self.batch_size
        return self.permutation(epoch)[start : start + self.batch_size]


def shard_bounds(count: int, weights: Sequence[float], rank: int) -> slice:
    """Return the shard of `count` samples that belongs to a rank.

    Shards are contiguous, disjoint and in rank order. Their bounds are rounded cumulative weights,
    so they always cover the batch exactly.
    """
    total = sum(weights)
    begin = round(count * sum(weights[:rank]) / total)
    end = round(count * sum(weights[: rank + 1]) / total)
    return slice(begin, end)


def rank_shard(count: int, weights: Sequence[float], rank: int) -> tuple[slice, int]:
    """Return the samples that a rank computes, and how many of them count.

    A rank whose shard is empty computes one sample that does not count, so that it takes part in
    the same collectives as the other ranks.
    """
    shard = shard_bounds(count, weights, rank)
    samples = shard.stop - shard.start
    return (shard if samples else slice(0, 1)), samples


def derive_seed(*numbers: int) -> int:
    """Hash numbers into one 63-bit seed (splitmix64); nearby inputs give unrelated seeds."""
    state = 0
    for number in numbers:
        state = (state ^ number) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & 0x7FFFFFFFFFFFFFFF
