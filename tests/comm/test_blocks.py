"""Workers that do not give the same to a sum in shared memory are told so, all of them."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.communicator import Communicator
from paceline.comm.shm import communicator as shared_memory
from paceline.errors import RunError
from tests.support.worker_pool import WorkerPool

CPU = torch.device("cpu")


def sum_different_parts(communicator: Communicator) -> str:
    """Of the second of two tensors, while the first is summed by all alike."""
    with shared_memory.connect(communicator) as team:
        both = [team.zeros(100_000, torch.float32, CPU) for _ in range(2)]
        team.all_reduce(both[0], "gradients").wait()
        with pytest.raises(RunError) as caught:
            team.all_reduce(both[1].tensor_split(2)[team.rank], "gradients").wait()
    return str(caught.value)


def test_different_parts_are_not_summed(pool: WorkerPool) -> None:
    assert pool.run(2, sum_different_parts) == [
        f"all_reduce: ranks {rank} and {1 - rank} sum different parts of what zeros gave them:"
        " all ranks are to give the same part, in the same order"
        for rank in range(2)
    ]


def sum_different_tensors(communicator: Communicator) -> str:
    """Of one size, which lie in the same place of different blocks; all were summed before."""
    with shared_memory.connect(communicator) as team:
        both = [team.zeros(100_000, torch.float32, CPU) for _ in range(2)]
        for tensor in 2 * both[:1] + 2 * both[1:]:
            team.all_reduce(tensor, "gradients").wait()
        with pytest.raises(RunError) as caught:
            team.all_reduce(both[team.rank], "gradients").wait()
    return str(caught.value)


def test_different_tensors_of_one_size_are_not_summed(pool: WorkerPool) -> None:
    assert all("sum different parts" in told for told in pool.run(2, sum_different_tensors))


def ask_for_different_sizes(communicator: Communicator) -> str:
    with shared_memory.connect(communicator) as team, pytest.raises(RunError) as caught:
        team.zeros(1000 + 24 * team.rank, torch.float32, CPU)
    return str(caught.value)


def test_different_sizes_are_refused_when_they_are_asked_for(pool: WorkerPool) -> None:
    told = "zeros: rank 1 asks for 4,096 bytes and rank 0 for 4,000: all ranks are to ask for the"
    assert pool.run(2, ask_for_different_sizes) == [f"{told} same"] * 2
