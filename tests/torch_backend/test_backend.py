"""The backend `paceline` behaves like gloo in programs written for torch.distributed."""

from __future__ import annotations

import gc
import io
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from time import monotonic, sleep
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.communicator import Communicator
from paceline.comm.process_groups import use_interface_of
from paceline.errors import PeerError
from paceline.torch_backend.process_group import PacelineProcessGroup
from tests.support import leaks
from tests.support.worker_pool import WorkerPool, free_port
from tests.torch_backend.backend_operations import OTHERS, OWN, WAYS, default_group, differences
from tests.torch_backend.backend_training import OPTIONS, lose_a_peer_in_training, train_twice

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4) as workers:
        yield workers


Found = dict[tuple[str, int], list[dict[str, list[str]]]]
"""Differences found by each rank, by host layout and number of workers."""

SETTINGS = [("memory", 1), ("memory", 2), ("memory", 3), ("memory", 4)]
MORE_SETTINGS = [("spare cores", 3), ("hosts", 3), ("hosts", 4)]


@pytest.fixture(scope="module")
def found(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return the differences from gloo."""
    folder = tmp_path_factory.mktemp("stores")
    return {
        (way, workers): pool.run(workers, differences, folder / f"{way}-{workers}", way)
        for way, workers in [*SETTINGS, *MORE_SETTINGS]
    }


@pytest.mark.parametrize(("way", "workers"), [*SETTINGS, *MORE_SETTINGS])
@pytest.mark.parametrize("name", OWN)
def test_own_operation_matches_gloo(found: Found, way: str, workers: int, name: str) -> None:
    assert [of_rank[name] for of_rank in found[way, workers]] == [[]] * workers


@pytest.mark.parametrize(("way", "workers"), SETTINGS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_operation_matches_gloo(found: Found, way: str, workers: int, name: str) -> None:
    assert [of_rank[name] for of_rank in found[way, workers]] == [[]] * workers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OPTIONS)
def test_training_with_two_workers_is_bit_identical_to_gloo(
    pool: WorkerPool, tmp_path: Path, way: str, kind: str
) -> None:
    # A sum of two numbers is rounded once in any order.
    for ours, theirs in pool.run(2, train_twice, tmp_path / "store", way, kind):
        assert ours == theirs


@pytest.mark.parametrize(("way", "workers"), [("memory", 3), ("hosts", 3), ("hosts", 4)])
def test_training_with_more_workers_matches_gloo_up_to_rounding(
    pool: WorkerPool, tmp_path: Path, way: str, workers: int
) -> None:
    # More than two numbers are added in a different order than in gloo.
    for ours, theirs in pool.run(workers, train_twice, tmp_path / "store", way, "plain"):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)


def use_objects_and_subgroups(communicator: Communicator, file: Path) -> list[object]:
    rank = communicator.rank
    with default_group(communicator, file) as group:
        everything: list[object] = [None] * 3
        dist.all_gather_object(everything, {"rank": rank})
        objects = [f"from {rank}"]
        dist.broadcast_object_list(objects, src=2)
        dist.barrier(device_ids=[0])
        pair = dist.new_group([0, 2])
        tensor = torch.tensor([rank + 1.0])
        if rank != 1:
            dist.all_reduce(tensor, group=pair)
        row = init_device_mesh("cpu", (3,)).get_group()
        dist.all_reduce(tensor, group=row)
        return [everything, objects, float(tensor), dist.get_backend(), group.name()]


def test_objects_subgroups_and_meshes_work(pool: WorkerPool, tmp_path: Path) -> None:
    ranks = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    # 1 + 3 on the first and last rank, 2 on the others, then the sum of all.
    expected = [ranks, ["from 2"], 4.0 + 2.0 + 4.0, "paceline", "paceline"]
    assert pool.run(3, use_objects_and_subgroups, tmp_path / "store") == [expected] * 3


POLLING_SECONDS = 20.0

COALESCED_ROUNDS = 2000


def sum_coalesced(communicator: Communicator, file: Path) -> list[str]:
    """Return rounds with wrong results. Gloo threads free tensors concurrently."""
    ranks = communicator.world_size
    expected = {
        dist.ReduceOp.SUM: ranks * (ranks + 1) // 2,
        dist.ReduceOp.PRODUCT: math.factorial(ranks),
        dist.ReduceOp.MIN: 1,
        dist.ReduceOp.MAX: ranks,
    }
    wrong = []
    with default_group(communicator, file), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated in PyTorch
        for number in range(COALESCED_ROUNDS // len(expected)):
            for operation, value in expected.items():
                tensors = [torch.full((size,), communicator.rank + 1.0) for size in (5, 6, 1000)]
                dist.all_reduce_coalesced(tensors, operation)
                if not all(bool((tensor == value).all()) for tensor in tensors):
                    wrong.append(f"{operation} of round {number}")
            if number % 20 == 0:
                dist.barrier()
    return wrong


@pytest.mark.parametrize("workers", [2, 3])
def test_many_coalesced_sums_complete(pool: WorkerPool, tmp_path: Path, workers: int) -> None:
    assert pool.run(workers, sum_coalesced, tmp_path / "store") == [[]] * workers


def test_all_operations_looked_up_in_python_are_overridden() -> None:
    """PyTorch runs all others with the GIL held, which gloo threads need."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/PyProcessGroup.hpp"
    text = header.read_text()
    overridable = r"WORK_OVERRIDE\(\s*(?://[^\n]*\s*)?ProcessGroup, /\* Parent class \*/\s*(\w+)"
    looked_up = set(re.findall(overridable, text))
    looked_up |= set(re.findall(r'<const ProcessGroup\*>\(this\),\s*"(\w+)"', text))
    assert {"allreduce", "allreduce_coalesced", "recv"} <= looked_up
    # Gloo does not support coalescing and fails immediately.
    looked_up -= {"start_coalescing", "end_coalescing"}
    assert looked_up <= set(vars(PacelineProcessGroup))


def receive_before_waiting(communicator: Communicator, file: Path, way: str) -> list[float]:
    """One rank joins an all-reduce only after the other, which started it, received a message."""
    with default_group(communicator, file, way):
        large, message = torch.ones(1_000_000), torch.zeros(1_000_000)
        if communicator.rank == 0:
            work = dist.all_reduce(large, async_op=True)
            dist.recv(message, 1)
            work.wait()
        else:
            dist.send(torch.ones(1_000_000), 0)
            dist.all_reduce(large)
        return [float(large.sum()), float(message.sum())]


@pytest.mark.parametrize("way", WAYS)
def test_pending_operation_does_not_block_others(
    pool: WorkerPool, tmp_path: Path, way: str
) -> None:
    results = pool.run(2, receive_before_waiting, tmp_path / "store", way)
    assert results == [[2_000_000.0, 1_000_000.0], [2_000_000.0, 0.0]]


def look_at_works(communicator: Communicator, file: Path, way: str) -> list[object]:
    with default_group(communicator, file, way):
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        work.wait()
        return [
            future.wait()[0].tolist(),
            future.done(),
            work.is_completed(),
            work.is_success(),
            work.exception(),
            torch.equal(work.result()[0], tensor),
        ]


@pytest.mark.parametrize("way", WAYS)
def test_work_reports_its_outcome(pool: WorkerPool, tmp_path: Path, way: str) -> None:
    expected = [[2.0, 2.0, 2.0], True, True, True, None, True]
    assert pool.run(2, look_at_works, tmp_path / "store", way) == [expected] * 2


def left_behind(communicator: Communicator, file: Path, way: str) -> list[str]:
    """Return the leaks after the default group was created, used and destroyed."""
    gc.collect()
    before, counts = leaks.take(), _open_files_and_threads()
    with default_group(communicator, file, way):
        dist.new_group([0])
        replica = DistributedDataParallel(nn.Linear(3, 3))
        replica(torch.ones(2, 3)).sum().backward()
        dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX)
        del replica
    gc.collect()
    found = leaks.leaks_since(before)
    if _open_files_and_threads() != counts:
        found.append(f"{counts} open files and threads became {_open_files_and_threads()}")
    if "/dev/shm/paceline" in Path("/proc/self/maps").read_text():
        found.append("a map of shared memory")
    return found


def _open_files_and_threads() -> tuple[int, int]:
    """Including those of C++, which Python does not track."""
    return len([*Path("/proc/self/fd").iterdir()]), len([*Path("/proc/self/task").iterdir()])


@pytest.mark.parametrize("way", WAYS)
def test_destroyed_group_leaks_nothing(pool: WorkerPool, tmp_path: Path, way: str) -> None:
    assert pool.run(2, left_behind, tmp_path / "store", way) == [[], []]


def sum_without_shared_memory(communicator: Communicator, file: Path) -> list[object]:
    with (
        mock.patch("paceline.comm.shm.communicator.is_supported", return_value=False),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        with default_group(communicator, file):
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
    return [float(tensor), *(str(each.message) for each in caught)]


def test_gloo_is_used_if_shared_memory_is_unavailable(pool: WorkerPool, tmp_path: Path) -> None:
    cause = "shared memory between workers requires Linux on x86-64"
    expected = [2.0, f"paceline: using gloo instead of shared memory: {cause}"]
    assert pool.run(2, sum_without_shared_memory, tmp_path / "store") == [expected] * 2


def lose_a_peer_of_gloos(communicator: Communicator, file: Path, way: str) -> str:
    with default_group(communicator, file, way):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX)
        if communicator.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.recv(torch.ones(3), 1)
        except PeerError as error:
            return str(error)
        return "no error"


def poll_a_lost_peer(communicator: Communicator, file: Path) -> list[object]:
    with default_group(communicator, file):
        dist.barrier()
        if communicator.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        deadline = monotonic() + POLLING_SECONDS
        while not work.is_completed() and monotonic() < deadline:
            sleep(0.001)
        return [work.is_completed(), work.is_success(), str(work.exception())]


def test_work_with_a_killed_peer_completes_with_an_error(tmp_path: Path) -> None:
    with WorkerPool(2) as fresh_pool:
        survivor, victim = fresh_pool.outcomes(2, poll_a_lost_peer, tmp_path / "store", fresh=True)
    assert victim.died
    message = "rank 0: all_reduce with rank 1: its process exited"
    assert survivor.value == [True, False, message]


@pytest.mark.parametrize(
    ("work", "way", "message"),
    [
        (lose_a_peer_in_training, "memory", "all_reduce with rank 1: its process exited"),
        (
            lose_a_peer_in_training,
            "spare cores",
            "allreduce with rank 1: the connection was closed",
        ),
        (lose_a_peer_in_training, "hosts", "all_reduce with rank 1: the connection was closed"),
        (lose_a_peer_of_gloos, "memory", "recv from rank 1: the connection was closed"),
    ],
)
def test_killed_peer_is_a_one_line_error(
    tmp_path: Path, work: Callable[[Communicator, Path, str], str], way: str, message: str
) -> None:
    # The timeout of the group is 30 minutes: only the lost peer can end the operations.
    with WorkerPool(2) as fresh_pool:
        survivor, victim = fresh_pool.outcomes(2, work, tmp_path / "store", way, fresh=True)
    assert victim.died
    assert survivor.value == f"rank 0: {message}"


def sum_on_gpu(communicator: Communicator, file: Path) -> list[float]:
    with default_group(communicator, file):
        tensor = torch.full((5,), communicator.rank + 1.0, device="cuda:0")
        dist.all_reduce(tensor)
        return tensor.tolist()


@pytest.mark.gpu
def test_gpu_tensors_use_gloo(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, sum_on_gpu, tmp_path / "store") == [[3.0] * 5] * 2


def test_pytorch_loads_the_backend_from_its_entry_point(tmp_path: Path) -> None:
    """Uses the entry point declared in pyproject.toml, not the installed one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["torch.backends"]
    installed = tmp_path / "declared-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1\n")
    lines = [f"{name}2 = {value}" for name, value in declared.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines]))
    program = (
        "import sys, torch.distributed as dist;"
        "print('paceline' in dist.Backend.backend_list, 'paceline.comm' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    # Registered without importing the modules that only a process group needs.
    assert done.stdout.split() == ["True", "False"], done.stderr


KEPT: list[object] = []
"""Programs must exit with their processes: freeing a gloo group while its threads are still
ending may wait for them forever."""


def run_example(communicator: Communicator, port: int, backend: str) -> str:
    """Return the output of the example, started as torchrun does."""
    environment = {
        "RANK": communicator.rank,
        "WORLD_SIZE": communicator.world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in environment.items()}),
        mock.patch.object(sys, "argv", ["own_ddp.py", backend]),
        use_interface_of("127.0.0.1"),
        redirect_stdout(io.StringIO()) as printed,
    ):
        KEPT.append(runpy.run_path(str(ROOT / "examples" / "own_ddp.py")))
    return printed.getvalue()


def test_example_gives_the_same_result_with_both_backends(pool: WorkerPool) -> None:
    ours, theirs = (
        pool.run(2, run_example, free_port(), backend)[0] for backend in ("paceline", "gloo")
    )
    assert ours.startswith("backend paceline, workers 2\n")
    assert theirs.startswith("backend gloo, workers 2\n")
    learned = re.search(r"accuracy (\S+), sum of weights \S+", ours)
    assert learned is not None
    assert float(learned[1]) > 0.9
    assert learned[0] in theirs
