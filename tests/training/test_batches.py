"""Batches that each worker of a user's own loop brings itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.rank_info import SINGLE_PROCESS
from paceline.config import from_mapping
from paceline.errors import UsageError
from paceline.strategies import create_strategy
from paceline.training.batches import (
    BatchCounts,
    count_samples,
    pack_counts,
    to_device,
    unpack_counts,
)
from paceline.training.session import Session

CPU = torch.device("cpu")


def samples(*numbers: int) -> tuple[Tensor]:
    return (torch.tensor(numbers, dtype=torch.float32).reshape(-1, 1),)


def session_of(communicator: Communicator, strategy: str = "allreduce") -> Session:
    rank, workers = communicator.rank, communicator.world_size
    rank_info = replace(
        SINGLE_PROCESS, rank=rank, local_rank=rank, world_size=workers, local_world_size=workers
    )
    config = from_mapping({"strategy": strategy, "nproc_per_node": workers})
    return Session(config, rank_info, communicator, create_strategy(strategy, {}), CPU)


def train(session: Session, data: Iterable[Any], epochs: int = 1) -> tuple[float, dict[str, Any]]:
    """Fit a constant to the samples; returns it, and the account."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    trained, _, batches = session.prepare(model, optimizer, data)
    for _ in range(epochs):
        for (x,) in batches:
            session.backward((trained(torch.ones_like(x)) - x).pow(2).mean())
            session.step()
    session.finish()
    return model.weight.item(), session.account()


def fit(batches: Iterable[Iterable[float]]) -> float:
    """The same by hand: a step moves the constant half of the way to the mean of the batch."""
    constant = 0.0
    for batch in batches:
        values = list(batch)
        constant += 0.5 * (sum(values) / len(values) - constant)
    return constant


def together(
    *data: Iterable[Any], epochs: int = 1, strategy: str = "allreduce"
) -> list[tuple[float, dict[str, Any]]]:
    return in_process.run(
        len(data),
        lambda communicator: train(
            session_of(communicator, strategy), data[communicator.rank], epochs
        ),
    )


@pytest.mark.parametrize("strategy", ["allreduce", "overlap", "ring"])
def test_batches_of_different_sizes_are_weighted_by_their_samples(strategy: str) -> None:
    one = [samples(1, 2, 3), samples(4)]
    two = [samples(5), samples(6, 7)]
    for constant, account in together(one, two, strategy=strategy):
        assert constant == pytest.approx(fit([(1, 2, 3, 5), (4, 6, 7)]))
        assert account["samples"] in (4, 3)


def test_a_worker_without_batches_left_contributes_nothing_and_nobody_waits() -> None:
    longest = [samples(1), samples(2), samples(3)]
    accounts = []
    for constant, account in together(longest, [samples(8)], [samples(5), samples(6)], epochs=2):
        # Waiting for the others at the end of the data is not subtracted from input.
        assert min(account["phases"].values()) >= 0
        assert constant == pytest.approx(fit([(1, 8, 5), (2, 6), (3,)] * 2))
        accounts.append(account)
    assert [account["samples"] for account in accounts] == [6, 2, 4]


def test_batches_without_countable_samples_have_equal_weights() -> None:
    class Opaque:
        def __init__(self, *numbers: int) -> None:
            self.values = torch.tensor(numbers, dtype=torch.float32).reshape(-1, 1)

        def __iter__(self) -> Iterator[Tensor]:
            return iter((self.values,))

    for constant, account in together([Opaque(1, 2, 3)], [Opaque(6)]):
        assert constant == pytest.approx(fit([((1 + 2 + 3) / 3, 6)]))
        assert account["samples"] is None


def test_a_worker_that_never_has_a_batch_is_named() -> None:
    with pytest.raises(UsageError, match="the batches of rank 1 are empty"):
        together([samples(1)], [])


def loader(rank: int, **arguments: Any) -> DataLoader[Any]:
    dataset = TensorDataset(torch.arange(12.0).reshape(-1, 1))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, 2, rank, shuffle=True, seed=3)
    return DataLoader(dataset, batch_size=4, sampler=sampler, **arguments)


def test_samplers_shuffle_every_epoch_anew() -> None:
    expected = []
    for epoch in range(2):
        epochs = []
        for one in (loader(0), loader(1)):
            one.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            epochs.append([x.flatten().tolist() for (x,) in one])
        expected += [first + second for first, second in zip(*epochs, strict=True)]
    for constant, _ in together(loader(0), loader(1), epochs=2):
        assert constant == pytest.approx(fit(expected))


def test_a_loader_keeps_its_workers_and_its_collate_function() -> None:
    def doubled(rows: list[tuple[Tensor]]) -> tuple[Tensor]:
        return (2 * torch.stack([row[0] for row in rows]),)

    dataset = TensorDataset(torch.arange(4.0).reshape(-1, 1))
    own = DataLoader(dataset, batch_size=2, num_workers=1, collate_fn=doubled)
    with in_process.single() as communicator:
        constant, account = train(session_of(communicator), own)
    assert constant == pytest.approx(fit([(0, 2), (4, 6)]))
    assert account["samples"] == 4


def test_the_time_of_an_iterable_is_input() -> None:
    class Slow:
        def __iter__(self) -> Iterator[tuple[Tensor]]:
            for number in range(3):
                time.sleep(0.03)
                yield samples(number)

    with in_process.single() as communicator:
        _, account = train(session_of(communicator), Slow(), epochs=2)
    assert account["phases"]["input"] >= 6 * 0.03
    assert sum(account["phases"].values()) == pytest.approx(account["wall_seconds"])


def test_an_iterator_cannot_be_read_twice() -> None:
    with in_process.single() as communicator:
        assert train(session_of(communicator), iter([samples(2)]))[0] == 1.0
        with pytest.raises(UsageError, match="an iterator can be read only once"):
            train(session_of(communicator), iter([samples(2)]), epochs=2)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(1)


@pytest.mark.parametrize(
    ("data", "batch_size", "problem"),
    [
        (DataLoader(TensorDataset(torch.zeros(4, 1))), 2, "batch_size: leave it out"),
        (iter([samples(1)]), 2, "batch_size: leave it out"),
        (TensorDataset(torch.zeros(4, 1)), None, "batch_size: missing"),
        ((torch.zeros(4, 1), torch.zeros(4)), None, "batch_size: missing"),
        (Endless(), None, "batch_size: missing"),
        (Endless(), 2, "dataset: must have a length; pass a DataLoader"),
        (5, None, "pass a dataset, a DataLoader or an iterable of batches"),
    ],
    ids=["loader", "iterator", "dataset", "tensors", "endless", "endless sized", "number"],
)
def test_data_that_cannot_be_read_is_rejected(
    data: Any, batch_size: int | None, problem: str
) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with in_process.single() as communicator:
        session = session_of(communicator)
        with pytest.raises(UsageError, match=problem):
            session.prepare(model, optimizer, data, batch_size=batch_size)
        # A corrected call may follow.
        session.prepare(model, optimizer, [samples(1)])


def test_a_loader_that_is_not_sharded_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    data = [DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "paceline"):
        together(*data)
        assert [record.message for record in caplog.records] == [
            "the DataLoader has no DistributedSampler: each of the 2 workers reads all samples in"
            " every epoch"
        ]
        caplog.clear()
        together(loader(0), loader(1))
        assert not caplog.records


class Pair(NamedTuple):
    x: Tensor
    name: str


def test_batches_keep_their_types_on_any_device() -> None:
    meta = torch.device("meta")
    batch = {"pair": Pair(torch.zeros(3, 2), "a"), "more": [torch.zeros(3), (torch.ones(1), 5)]}
    moved = to_device(batch, meta)
    assert isinstance(moved["pair"], Pair)
    assert (moved["pair"].x.device, moved["pair"].name) == (meta, "a")
    assert isinstance(moved["more"][1], tuple)
    assert moved["more"][1][0].device == meta


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(4), torch.zeros(4, 3)), 4),
        ({"name": "a", "x": [torch.zeros(3, 1)]}, 3),
        (["a", torch.tensor(1.0)], None),
        (object(), None),
    ],
    ids=["tensor", "tuple", "dict", "scalar", "object"],
)
def test_samples_are_counted_by_the_first_dimension(batch: Any, count: int | None) -> None:
    assert count_samples(batch) == count


@pytest.mark.parametrize(
    ("workers", "total"),
    [
        ([(32, True), (7, True)], BatchCounts(samples=39, workers=2, uncounted=0)),
        ([(32, True), (None, True), (0, False)], BatchCounts(32, 2, 1)),
        ([(0, False), (0, False)], BatchCounts(0, 0, 0)),
        ([(2**21, True)] * 16_383, BatchCounts(2**21 * 16_383, 16_383, 0)),
        ([(None, True)] * 16_383, BatchCounts(0, 16_383, 16_383)),
    ],
    ids=["all", "one is unknown", "none", "most workers", "most unknown"],
)
def test_the_sum_of_packed_counts_has_the_sum_of_each(
    workers: list[tuple[int | None, bool]], total: BatchCounts
) -> None:
    packed = torch.cat([pack_counts(samples, has_batch=has) for samples, has in workers])
    assert unpack_counts(packed.sum()) == total
