"""Which samples make up which batch: a function of (seed, epoch) and of nothing else.

Global batch `i` of an epoch holds the same samples whatever the number of workers; workers take
shares of it. So any synchronous strategy computes what one worker computes, and a resumed or
resized run still sees each sample exactly once an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class GlobalBatchSampler:
    samples: int
    batch_size: int
    seed: int
    reshuffle: bool = True
    """Without it every epoch repeats the first: the classic mistake, kept for studies."""
    _cached: tuple[int, Tensor] | None = field(default=None, repr=False)

    @property
    def batches_per_epoch(self) -> int:
        """The last batch of an epoch holds what is left, so that no sample is dropped."""
        return -(-self.samples // self.batch_size)

    def permutation(self, epoch: int) -> Tensor:
        epoch = epoch if self.reshuffle else 0
        if self._cached is None or self._cached[0] != epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
            self._cached = (epoch, torch.randperm(self.samples, generator=generator))
        return self._cached[1]

    def batch_samples(self, index: int) -> int:
        """How many samples global batch `index` of an epoch holds."""
        return min(self.batch_size, self.samples - index * self.batch_size)

    def batch(self, epoch: int, index: int) -> Tensor:
        """The samples of global batch `index` of an epoch."""
        start = index * self.batch_size
        return self.permutation(epoch)[start : start + self.batch_size]


def shard_bounds(count: int, weights: Sequence[float], rank: int) -> slice:
    """The part of `count` samples that a rank takes: contiguous, disjoint, in the ranks' order.

    Bounds are the rounded cumulative weights, so that the shares always cover the batch exactly.
    """
    total = sum(weights)
    begin = round(count * sum(weights[:rank]) / total)
    end = round(count * sum(weights[: rank + 1]) / total)
    return slice(begin, end)


def rank_shard(count: int, weights: Sequence[float], rank: int) -> tuple[slice, int]:
    """A rank's part of a batch to compute, and how many samples of it count.

    A worker without a share computes a sample that does not count, to stay in step.
    """
    part = shard_bounds(count, weights, rank)
    samples = part.stop - part.start
    return (part if samples else slice(0, 1)), samples


def derive_seed(*numbers: int) -> int:
    """One 63-bit seed out of several numbers, such that neighbours share nothing (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state ^ number) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & 0x7FFFFFFFFFFFFFFF
