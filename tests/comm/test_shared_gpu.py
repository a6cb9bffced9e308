"""Workers that share one GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.comm import cuda_ipc
from paceline.comm.buffers import chunk
from paceline.comm.communicator import Communicator
from paceline.comm.cuda_ipc import CudaIpcMemory
from paceline.comm.shared_gpu import DeviceGroup, SharedGpuCommunicator
from paceline.errors import PeerError
from tests.support import fake_device_memory
from tests.support.worker_pool import WorkerPool

GPU = torch.device("cuda:0")
SLOT_BYTES = 64 * 1024
SLEEP_CYCLES = 10**8


def values(rank: int, elements: int, device: torch.device) -> torch.Tensor:
    """Values whose sum depends on the order of summation."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-20, 20, (elements,), generator=generator)
    return (torch.randn(elements, generator=generator) * 2.0**exponents).to(device)


def sums_in_rank_order(
    communicator: Communicator, connect: object, device: torch.device
) -> list[str]:
    """Return what differs from the sum in rank order."""
    assert callable(connect)
    wrong = []
    with connect(communicator) as shared:
        for elements in (1, 5, 4096, 50_001):
            inputs = [values(rank, elements, device) for rank in range(shared.world_size)]
            expected = inputs[0].clone()
            for each in inputs[1:]:
                expected += each
            total, scattered = inputs[shared.rank].clone(), inputs[shared.rank].clone()
            works = [shared.all_reduce(total, "gradients")]
            works.append(shared.reduce_scatter(scattered, "gradients"))
            for work in works:
                work.wait()
            if not torch.equal(total, expected):
                wrong.append(f"all_reduce of {elements}")
            own = [chunk(each, shared.world_size, shared.rank) for each in (scattered, expected)]
            if not torch.equal(*own):
                wrong.append(f"reduce_scatter of {elements}")
            shared.all_gather(scattered, "parameters").wait()
            if not torch.equal(scattered, expected):
                wrong.append(f"all_gather of {elements}")
            copied = inputs[shared.rank].clone()
            shared.broadcast(copied, shared.world_size - 1, "parameters").wait()
            if not torch.equal(copied, inputs[-1]):
                wrong.append(f"broadcast of {elements}")
        shared.barrier().wait()
    return wrong


CPU = torch.device("cpu")


def test_sums_are_in_rank_order(pool: WorkerPool) -> None:
    run = pool.run(3, sums_in_rank_order, fake_device_memory.connect, CPU)
    assert run == [[], [], []]


class Unavailable(SharedGpuCommunicator):
    def _connect_group(self, bootstrap: Communicator) -> DeviceGroup:
        raise RuntimeError("the workers use different GPUs")


def sum_without_shared_memory(communicator: Communicator) -> list[float]:
    with fake_device_memory.connect(communicator, CPU, Unavailable) as shared:
        tensor = torch.full((3,), shared.rank + 1.0)
        shared.all_reduce(tensor, "gradients").wait()
        shared.barrier().wait()
        return tensor.tolist()


def test_workers_that_cannot_share_memory_use_torch_distributed(pool: WorkerPool) -> None:
    assert pool.run(2, sum_without_shared_memory) == [[3.0] * 3] * 2


def lose_rank_one(communicator: Communicator, connect: object, device: torch.device) -> str:
    assert callable(connect)
    shared = connect(communicator)
    shared.all_reduce(torch.ones(3, device=device), "gradients").wait()
    if shared.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        shared.all_reduce(torch.ones(3, device=device), "gradients").wait()
    except PeerError as error:
        return str(error)
    finally:
        shared.close()
    return "no error"


def test_killed_peer_is_an_error() -> None:
    with WorkerPool(2) as workers:
        lost = workers.outcomes(
            2, lose_rank_one, fake_device_memory.connect, CPU, fresh=True, timeout_seconds=1000.0
        )
    assert lost[1].died
    assert lost[0].value == "rank 0: all_reduce with rank 1: its process exited"


def connected_once(communicator: Communicator) -> tuple[bool, bool]:
    with fake_device_memory.connect(communicator) as shared:
        shared.barrier().wait()
        return shared.shares_memory, shared._background is None


def test_connecting_does_not_duplicate_the_communicator(pool: WorkerPool) -> None:
    """A duplicate would connect in turn, and so on."""
    assert pool.run(2, connected_once) == [(True, True)] * 2


def obstacle(communicator: Communicator) -> str | None:
    with fake_device_memory.connect(communicator) as shared:
        shared.barrier().wait()
        return shared.capture_obstacle()


def test_exchange_on_a_shared_gpu_is_not_captured(pool: WorkerPool) -> None:
    assert pool.run(2, obstacle) == ["workers that share a GPU synchronize through the CPU"] * 2


class SmallSlots(SharedGpuCommunicator):
    """Needs several rounds for most tensors."""

    def _connect_group(self, bootstrap: Communicator) -> DeviceGroup:
        return DeviceGroup(
            bootstrap,
            lambda each, *sizes: CudaIpcMemory(each, self.shared_gpu, *sizes),
            SLOT_BYTES,
        )


def connect_small(communicator: Communicator) -> SharedGpuCommunicator:
    shared = fake_device_memory.connect(communicator, GPU, SmallSlots)
    assert shared.shares_memory
    return shared


def connect_large(communicator: Communicator) -> SharedGpuCommunicator:
    shared = fake_device_memory.connect(communicator, GPU, SharedGpuCommunicator)
    assert shared.shares_memory
    return shared


def create_event_files(communicator: Communicator) -> None:
    with connect_small(communicator) as shared:
        shared.barrier().wait()


def unlink_event_files(_communicator: Communicator) -> None:
    cuda_ipc.unlink_event_files()


@pytest.fixture(scope="module")
def gpu_pool() -> Iterator[WorkerPool]:
    with WorkerPool(3) as workers:
        # CUDA keeps files in /dev/shm from the first event that a process exports on.
        workers.run(3, create_event_files)
        yield workers
        workers.run(3, unlink_event_files)


@pytest.mark.gpu
def test_gpu_sums_are_in_rank_order(gpu_pool: WorkerPool) -> None:
    assert gpu_pool.run(2, sums_in_rank_order, connect_small, GPU) == [[], []]
    assert gpu_pool.run(3, sums_in_rank_order, connect_large, GPU) == [[], [], []]


def bytes_kept_after_closing(communicator: Communicator) -> int:
    before = torch.cuda.memory_allocated(GPU)
    with connect_large(communicator) as shared:
        shared.barrier().wait()
    return torch.cuda.memory_allocated(GPU) - before


@pytest.mark.gpu
def test_closing_frees_the_memory_of_all_ranks(gpu_pool: WorkerPool) -> None:
    assert gpu_pool.run(3, bytes_kept_after_closing) == [0, 0, 0]


def sum_behind_slow_work(communicator: Communicator) -> tuple[bool, list[float]]:
    """Sum what the GPU computes much later, on another stream; read it on a third one."""
    with connect_large(communicator) as shared:
        tensor, copy = torch.zeros(2_000_000, device=GPU), torch.zeros(2_000_000, device=GPU)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(SLEEP_CYCLES * (1 + shared.rank))
            tensor.fill_(shared.rank + 1.0)
            shared.all_reduce(tensor, "gradients").wait()
            copy.copy_(tensor)
            after = torch.cuda.Event()
            after.record()
            is_early = not after.query()
        after.synchronize()
        shared.barrier().wait()
        return is_early, [float(copy.min()), float(copy.max())]


@pytest.mark.gpu
def test_exchange_is_ordered_by_streams_without_blocking_the_host(gpu_pool: WorkerPool) -> None:
    outcomes = gpu_pool.run(2, sum_behind_slow_work)
    assert [values for _, values in outcomes] == [[3.0, 3.0]] * 2
    assert any(is_early for is_early, _ in outcomes)


def unlink_files_of_killed(process: int) -> None:
    """Unlink the files of a process that could not: CUDA's of events, torch's of references."""
    for name in (f"cuda.shm.*.{process:x}.*", f"torch_{process}_*"):
        for path in Path("/dev/shm").glob(name):
            path.unlink()


@pytest.mark.gpu
def test_killed_peer_on_a_shared_gpu_is_an_error() -> None:
    with WorkerPool(2) as workers:
        processes = [worker.process.pid or 0 for worker in workers._workers]
        lost = workers.outcomes(
            2, lose_rank_one, connect_large, GPU, fresh=True, timeout_seconds=1000.0
        )
    for process in processes:
        unlink_files_of_killed(process)
    assert lost[0].value == "rank 0: all_reduce with rank 1: its process exited"


def sum_repeatedly(communicator: Communicator) -> bool:
    with connect_small(communicator) as shared:
        tensor, expected = torch.ones(100_000, device=GPU), 1.0
        for _ in range(40):
            shared.all_reduce(tensor, "gradients").wait()
            tensor.mul_(0.75)
            expected *= 2 * 0.75
        is_equal = bool((tensor == expected).all())
        seconds = shared.traffic.to_dict()["gradients"]["seconds"]
        shared.barrier().wait()
        return is_equal and seconds > 0


@pytest.mark.gpu
def test_many_exchanges_in_a_row(gpu_pool: WorkerPool) -> None:
    assert gpu_pool.run(2, sum_repeatedly) == [True, True]
