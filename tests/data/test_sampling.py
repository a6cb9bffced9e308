"""Sample order: a function of (seed, epoch), sharded without loss or repetition."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from paceline.data.sampling import GlobalBatchSampler, derive_seed, shard_bounds


def cases() -> Iterator[tuple[int, int, list[float]]]:
    """Divisible and indivisible sizes with equal, unequal, zero and too many weights."""
    yield 10, 10, [1.0]
    yield 7, 3, [1, 1]
    yield 100, 32, [1, 1, 1]
    yield 5, 2, [1, 1, 1, 1]
    yield 64, 64, [3, 1]
    yield 65, 64, [2, 0, 1]
    dice = random.Random(5)
    for _ in range(60):
        samples = dice.randint(1, 200)
        weights = [dice.random() + 0.01 for _ in range(dice.randint(1, 9))]
        yield samples, dice.randint(1, samples), weights


def collect(order: GlobalBatchSampler, epoch: int, weights: list[float]) -> list[list[int]]:
    """Return the samples of each rank over an epoch."""
    given: list[list[int]] = [[] for _ in weights]
    for index in range(order.batches_per_epoch):
        batch = order.batch(epoch, index)
        for rank, samples in enumerate(given):
            samples += batch[shard_bounds(len(batch), weights, rank)].tolist()
    return given


@pytest.mark.parametrize(("samples", "batch_size", "weights"), list(cases()))
def test_ranks_see_each_sample_once_per_epoch(
    samples: int, batch_size: int, weights: list[float]
) -> None:
    order = GlobalBatchSampler(samples, batch_size, seed=3)
    for epoch in (0, 1, 7):
        seen = [sample for rank in collect(order, epoch, weights) for sample in rank]
        assert sorted(seen) == list(range(samples))


@pytest.mark.parametrize(("samples", "batch_size", "weights"), list(cases()))
def test_shards_concatenate_to_the_global_batch(
    samples: int, batch_size: int, weights: list[float]
) -> None:
    order = GlobalBatchSampler(samples, batch_size, seed=3)
    for index in range(order.batches_per_epoch):
        batch = order.batch(2, index)
        parts = [batch[shard_bounds(len(batch), weights, rank)] for rank in range(len(weights))]
        assert torch.equal(torch.cat(parts), batch)


def test_equal_weights_give_shards_that_differ_by_at_most_one() -> None:
    for count in range(130):
        for workers in range(1, 18):
            sizes = [
                part.stop - part.start
                for part in (shard_bounds(count, [1.0] * workers, rank) for rank in range(workers))
            ]
            assert max(sizes) - min(sizes) <= 1


def test_shard_size_is_proportional_to_its_weight() -> None:
    sizes = [shard_bounds(600, [1, 2, 3], rank) for rank in range(3)]
    assert sizes == [slice(0, 100), slice(100, 300), slice(300, 600)]


def test_last_batch_holds_the_remainder() -> None:
    order = GlobalBatchSampler(samples=10, batch_size=4, seed=0)
    assert [len(order.batch(0, index)) for index in range(order.batches_per_epoch)] == [4, 4, 2]


def test_resuming_mid_epoch_continues_with_the_same_batches() -> None:
    uninterrupted = GlobalBatchSampler(samples=50, batch_size=8, seed=1)
    every = [
        uninterrupted.batch(*divmod(iteration, uninterrupted.batches_per_epoch))
        for iteration in range(20)
    ]
    for stop in range(20):
        resumed = GlobalBatchSampler(samples=50, batch_size=8, seed=1)
        for iteration in range(stop, 20):
            epoch, index = divmod(iteration, resumed.batches_per_epoch)
            assert torch.equal(resumed.batch(epoch, index), every[iteration])


def test_each_epoch_and_seed_has_its_own_order() -> None:
    orders = {
        tuple(GlobalBatchSampler(30, 8, seed).permutation(epoch).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_without_reshuffling_every_epoch_has_the_same_batches() -> None:
    forgetful = GlobalBatchSampler(samples=40, batch_size=8, seed=2, reshuffle=False)
    careful = GlobalBatchSampler(samples=40, batch_size=8, seed=2)

    def composition(order: GlobalBatchSampler, epoch: int) -> list[frozenset[int]]:
        return [frozenset(order.batch(epoch, index).tolist()) for index in range(5)]

    for epoch in range(1, 6):
        assert composition(forgetful, epoch) == composition(forgetful, 0)
        assert composition(careful, epoch) != composition(careful, 0)


def test_reshuffling_does_not_change_the_first_epoch() -> None:
    forgetful = GlobalBatchSampler(samples=40, batch_size=8, seed=2, reshuffle=False)
    assert torch.equal(forgetful.permutation(3), GlobalBatchSampler(40, 8, 2).permutation(0))


def test_derived_seeds_do_not_collide() -> None:
    near = range(12)
    numbers = {derive_seed(a, b, c) for a in near for b in near for c in near}
    numbers |= {derive_seed(a, b) for a in near for b in near} | {derive_seed(a) for a in near}
    assert len(numbers) == 12**3 + 12**2 + 12


def test_derived_seeds_are_valid_torch_seeds() -> None:
    for number in (0, 1, 2**31, 2**63 - 1):
        mixed = derive_seed(number, number)
        assert 0 <= mixed < 2**63
        torch.Generator().manual_seed(mixed)


def test_adjacent_seeds_differ_in_about_half_their_bits() -> None:
    differing = [
        (derive_seed(seed, 0) ^ derive_seed(seed + 1, 0)).bit_count() for seed in range(500)
    ]
    assert 28 < sum(differing) / len(differing) < 35
