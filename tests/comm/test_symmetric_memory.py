"""In-place all-reduces reject ranks that pass different slices or sizes."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.communicator import Communicator
from paceline.comm.shm import communicator as shared_memory
from paceline.errors import RunError
from tests.support.worker_pool import WorkerPool

CPU = torch.device("cpu")


def reduce_different_slices(communicator: Communicator) -> str:
    """Reduce different halves of the second tensor after all ranks reduced the first."""
    with shared_memory.connect(communicator) as shm:
        first, second = (shm.zeros(100_000, torch.float32, CPU) for _ in range(2))
        shm.all_reduce(first, "gradients").wait()
        with pytest.raises(RunError) as caught:
            shm.all_reduce(second.tensor_split(2)[shm.rank], "gradients").wait()
    return str(caught.value)


def test_different_slices_are_rejected(pool: WorkerPool) -> None:
    assert pool.run(2, reduce_different_slices) == [
        f"all_reduce: ranks {rank} and {1 - rank} reduce different slices of tensors from zeros():"
        " all ranks must pass the same slice, in the same order"
        for rank in range(2)
    ]


def reduce_different_tensors(communicator: Communicator) -> str:
    """Reduce two tensors of the same size, and so at the same offset, after reducing both."""
    with shared_memory.connect(communicator) as shm:
        first, second = (shm.zeros(100_000, torch.float32, CPU) for _ in range(2))
        for tensor in (first, first, second, second):
            shm.all_reduce(tensor, "gradients").wait()
        with pytest.raises(RunError) as caught:
            shm.all_reduce((first, second)[shm.rank], "gradients").wait()
    return str(caught.value)


def test_different_tensors_of_the_same_size_are_rejected(pool: WorkerPool) -> None:
    errors = pool.run(2, reduce_different_tensors)
    assert all("reduce different slices" in error for error in errors)


def request_different_sizes(communicator: Communicator) -> str:
    with shared_memory.connect(communicator) as shm, pytest.raises(RunError) as caught:
        shm.zeros(1000 + 24 * shm.rank, torch.float32, CPU)
    return str(caught.value)


def test_different_sizes_are_rejected_on_allocation(pool: WorkerPool) -> None:
    error = (
        "zeros: rank 1 requests 4,096 bytes and rank 0 requests 4,000:"
        " all ranks must request the same size"
    )
    assert pool.run(2, request_different_sizes) == [error] * 2
