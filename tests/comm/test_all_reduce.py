"""Contract of all registered algorithms, on every communicator.

A new algorithm is tested by being registered. Where sums are compared, values are small integers,
so that they are exact in every dtype and in every order. Results travel as bytes: equal means equal
bit for bit.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from paceline.comm.algorithms import ALGORITHMS
from paceline.comm.background import CommunicationThread
from paceline.comm.communicator import Communicator
from paceline.measure.traffic import Traffic
from tests.support.rank_groups import RankGroup

SIZES = (0, 1, 1009, 100003)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16)
CASES = list(product(SIZES, DTYPES))

pytestmark = pytest.mark.parametrize("name", ALGORITHMS.names())


def integers_of(rank: int, size: int) -> Tensor:
    """Return small integers that differ by rank and element."""
    return torch.arange(size) * 7 % 13 + rank


def fractions_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return numbers whose sum depends on the order of summation, in bf16 and in float32."""
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def sums_of_integers(communicator: Communicator, name: str) -> list[bytes]:
    tensors = [integers_of(communicator.rank, size).to(dtype) for size, dtype in CASES]
    for tensor in tensors:
        ALGORITHMS.load(name)().all_reduce(communicator, tensor, "gradients")
    return [bits(tensor) for tensor in tensors]


def sums_of_fractions(communicator: Communicator, name: str) -> list[bytes]:
    tensors = [
        fractions_of(communicator.rank, size, dtype)
        for size in (1, 1009, 5000)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for tensor in tensors:
        ALGORITHMS.load(name)().all_reduce(communicator, tensor, "gradients")
    return [bits(tensor) for tensor in tensors]


def bytes_counted(communicator: Communicator, name: str) -> list[tuple[int, int]]:
    counted = []
    for size, dtype in CASES:
        communicator.traffic.restore(Traffic().to_dict())
        tensor = torch.zeros(size, dtype=dtype)
        ALGORITHMS.load(name)().all_reduce(communicator, tensor, "gradients")
        count = communicator.traffic.counts["gradients"]
        counted.append((count.bytes_sent, count.bytes_received))
    return counted


def sums_in_background(communicator: Communicator, name: str) -> list[bytes]:
    """Run two all-reduces while the caller sends messages."""
    algorithm, rank = ALGORITHMS.load(name)(), communicator.rank
    tensors = [integers_of(rank, 1009), integers_of(rank + 5, 64)]
    background = CommunicationThread(communicator)
    try:
        works = [
            background.submit(partial(algorithm.all_reduce, tensor=tensor, kind="gradients"))
            for tensor in tensors
        ]
        right = (rank + 1) % communicator.world_size
        left = (rank - 1) % communicator.world_size
        own, other = torch.full((64,), rank), torch.zeros(64, dtype=torch.int64)
        communicator.sendrecv(own, right, other, left, "metrics").wait()
        for work in works:
            work.wait()
    finally:
        background.close()
    return [*(bits(tensor) for tensor in tensors), bits(other)]


def test_sum_is_exact_on_every_rank(ranks: RankGroup, name: str) -> None:
    plain = [
        bits(sum((integers_of(rank, size) for rank in range(ranks.world_size)), torch.zeros(()))
             .to(dtype))
        for size, dtype in CASES
    ]  # fmt: skip
    for rank, sums in enumerate(ranks.run(sums_of_integers, name)):
        for case, got, expected in zip(CASES, sums, plain, strict=True):
            assert got == expected, (rank, case)


def test_every_rank_has_the_same_bits(ranks: RankGroup, name: str) -> None:
    first, *others = ranks.run(sums_of_fractions, name)
    assert all(other == first for other in others)


def test_second_run_has_the_same_bits(three_ranks: RankGroup, name: str) -> None:
    first, second = (three_ranks.run(sums_of_fractions, name) for _ in range(2))
    assert first == second


def test_counted_bytes_match_the_formula(ranks: RankGroup, name: str) -> None:
    algorithm = ALGORITHMS.load(name)()
    for rank, counted in enumerate(ranks.run(bytes_counted, name)):
        for (size, dtype), got in zip(CASES, counted, strict=True):
            where = (rank, ranks.world_size, size, dtype.itemsize)
            assert got == (algorithm.bytes_sent(*where), algorithm.bytes_received(*where)), where


def test_algorithm_runs_concurrently_with_other_messages(three_ranks: RankGroup, name: str) -> None:
    first = sum(integers_of(rank, 1009) for rank in range(3))
    second = sum(integers_of(rank + 5, 64) for rank in range(3))
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    for rank, got in enumerate(three_ranks.run(sums_in_background, name)):
        left = torch.full((64,), (rank - 1) % 3)
        assert got == [bits(first), bits(second), bits(left)]
