"""Programs for torch.distributed that know nothing of the profiler; run by every rank."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.communicator import Communicator
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.measure.phase_clock import PhaseClock
from paceline.profiler.collectives import recorder as collectives
from paceline.profiler.collectives.log import OPERATIONS, read_logs
from paceline.profiler.collectives.recorder import CollectiveRecorder

STEPS = 3


class MeasuredThread:
    """The thread that creates it, and its clock."""

    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.recorder_seconds = 0.0
        self._thread = threading.get_ident()

    def is_in_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def expose(self, began: float, ended: float) -> None:
        self.clock.expose(self.clock.phase, began, ended)

    def note_exposed(self, phase: str, seconds: float) -> None:
        pass


def measured(
    communicator: Communicator, folder: Path | None, program: Callable[..., Any], *arguments: Any
) -> tuple[Any, dict[str, float], list[str]]:
    """Run a program; returns its result, the phases and the errors of the recorder.

    Without a folder, nothing is recorded.
    """
    assert isinstance(communicator, TorchCommunicator)
    communicator.default_process_group()
    thread = MeasuredThread()
    errors: list[str] = []

    def guard(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            try:
                return function(*args)
            except Exception:  # noqa: BLE001 - returned to the test
                errors.append(traceback.format_exc())

        return call

    recorder = None
    if folder is not None:
        recorder = CollectiveRecorder(thread, folder, guard)
        recorder.install()
    try:
        result = program(communicator.rank, thread.clock, *arguments)
    finally:
        if recorder is not None:
            recorder.remove()
    thread.clock.enter("other")
    return result, thread.clock.seconds, errors


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4)
    )


class Branches(nn.Module):
    """Uses one of two layers, so one has no gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = self.used(batch)
        return output


def _train(rank: int, clock: PhaseClock, model: nn.Module, optimizer: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        batch = torch.randn(8, 16, generator=generator)
        clock.enter("forward")
        loss = model(batch).square().mean()
        clock.enter("backward")
        loss.backward()
        clock.enter("update")
        optimizer.step()
        optimizer.zero_grad()
        clock.enter("other")
    return [parameter.detach().clone() for parameter in model.parameters()]


def ddp(rank: int, clock: PhaseClock, kind: str) -> list[Tensor]:
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "buckets": {"bucket_cap_mb": 0.005},
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True, "gradient_as_bucket_view": True},
    }
    model = Branches() if kind == "unused" else model_of()
    wrapped = DistributedDataParallel(model, **options[kind])
    return _train(rank, clock, wrapped, torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9))


def without_callbacks(
    rank: int, clock: PhaseClock, program: Callable[..., Any], *arguments: Any
) -> Any:
    """As in a long run, where the exact end is known of few overlapped collectives."""
    with mock.patch.object(collectives, "EXACT_SECONDS", 1e9):
        return program(rank, clock, *arguments)


def fsdp(rank: int, clock: PhaseClock) -> list[Tensor]:
    model = model_of()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weights = _train(rank, clock, model, torch.optim.SGD(model.parameters(), 0.1))
    return [weight.full_tensor() for weight in weights]  # type: ignore[attr-defined]  # DTensor


def zero(rank: int, clock: PhaseClock) -> list[Tensor]:
    with warnings.catch_warnings(action="ignore"):  # its import uses torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = DistributedDataParallel(model_of())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return _train(rank, clock, model, optimizer)


def plain(rank: int, clock: PhaseClock) -> list[Tensor]:
    """Every function of torch.distributed once."""
    world = dist.get_world_size()
    mine = torch.arange(8.0) + rank
    results = []
    total = mine.clone()
    dist.all_reduce(total)
    later = mine.clone()
    work = dist.all_reduce(later, async_op=True)
    work.wait()
    root = mine.clone()
    dist.broadcast(root, 0)
    parts = [torch.empty(8) for _ in range(world)]
    dist.all_gather(parts, mine)
    whole = torch.empty(8 * world)
    dist.all_gather_into_tensor(whole, mine)
    share = torch.empty(8 // world)
    dist.reduce_scatter_tensor(share, mine.clone())
    exchanged = torch.empty(8)
    dist.all_to_all_single(exchanged, mine)
    reduced = mine.clone()
    dist.reduce(reduced, 0)
    gathered = [torch.empty(8) for _ in range(world)] if rank == 0 else None
    dist.gather(mine, gathered)
    scattered = torch.empty(8)
    dist.scatter(scattered, [mine + each for each in range(world)] if rank == 0 else None)
    coalesced = [mine.clone(), mine.clone() * 2]
    dist.all_reduce_coalesced(coalesced)
    dist.barrier()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    if rank == 0:
        dist.send(mine, 1)
        got = torch.empty(8)
    else:
        got = torch.empty(8)
        dist.recv(got, 0)
    arrived = torch.empty(8)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, (rank + 1) % world),
            dist.P2POp(dist.irecv, arrived, (rank - 1) % world),
        ]
    )
    for request in requests:
        request.wait()
    results += [total, later, root, *parts, whole, share, exchanged, scattered, *coalesced, arrived]
    return results


def in_evaluation(rank: int, clock: PhaseClock) -> list[Tensor]:
    """All functions of torch.distributed, in an evaluation."""
    clock.enter("evaluate")
    results = plain(rank, clock)
    clock.enter("other")
    return results


def functional_collectives(rank: int, clock: PhaseClock) -> list[Tensor]:
    mine = torch.arange(8.0) + rank
    world = list(range(dist.get_world_size()))
    total = functional.all_reduce(mine, "sum", world)
    whole = functional.all_gather_tensor(mine, 0, world)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    replicated = sharded.redistribute(mesh, [Replicate()]).to_local()
    return [total + 0, whole + 0, replicated + 0]


def groups(rank: int, clock: PhaseClock) -> list[Tensor]:
    """Collectives in a second group, and in a third one that reuses the name of the second."""
    totals = []
    for _ in range(2):
        group = dist.new_group(list(range(dist.get_world_size())))
        total = torch.full((4,), float(rank + 1))
        dist.all_reduce(total, group=group)
        dist.destroy_process_group(group)
        totals.append(total)
    return totals


def late_rank(rank: int, clock: PhaseClock, folder: Path) -> None:
    """Rank 1 comes to each all-reduce after rank 0 waits in it."""
    for step in range(STEPS):
        if rank == 1:
            _wait_for_arrivals(folder, step + 1)
        dist.all_reduce(torch.ones(1000))


def late_gradients(rank: int, clock: PhaseClock, folder: Path) -> None:
    """Rank 1 computes its gradients after rank 0 waits for them."""
    model = DistributedDataParallel(model_of())
    for step in range(STEPS):
        clock.enter("forward")
        outputs = model(torch.randn(8, 16))
        if rank == 1:
            outputs.register_hook(lambda _, step=step: _wait_for_arrivals(folder, step + 1))
        clock.enter("backward")
        outputs.square().mean().backward()
        clock.enter("other")


def _wait_for_arrivals(folder: Path, count: int) -> None:
    """Wait until rank 0 has issued so many all-reduces, and a moment longer."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        logs = next(read_logs(folder), {})
        operations = logs[0].records["operation"] if 0 in logs else np.zeros(0)
        if (operations == OPERATIONS.index("all_reduce")).sum() >= count:
            break
        time.sleep(0.005)
    time.sleep(0.02)


def overlapped(rank: int, clock: PhaseClock) -> None:
    """An all-reduce of which the program waits for the end only after it has ended."""
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()


def failing(rank: int, clock: PhaseClock) -> str:
    """A collective that raises an exception, then one that works."""
    options = dist.BroadcastOptions()
    options.rootRank = 5
    text = ""
    try:
        dist.group.WORLD.broadcast([torch.ones(4)], options)  # type: ignore[union-attr]
    except Exception as error:  # noqa: BLE001 - any that torch raises
        text = str(error)
    dist.barrier()
    return text


def train_on(rank: int, clock: PhaseClock, backend: str) -> list[Tensor]:
    """Train with DDP over a group of another backend, and use it directly."""
    group = dist.new_group(list(range(dist.get_world_size())), backend=backend)
    model = DistributedDataParallel(model_of(), process_group=group)
    weights = _train(rank, clock, model, torch.optim.SGD(model.parameters(), 0.1))
    total = torch.full((4,), float(rank))
    dist.all_reduce(total, group=group)
    whole = torch.empty(8)
    dist.all_gather_into_tensor(whole, total, group=group)
    dist.barrier(group)
    dist.destroy_process_group(group)
    return [*weights, total, whole]


def different_sizes(rank: int, clock: PhaseClock) -> None:
    """Ranks add tensors of different sizes, which ends in an error or a timeout."""
    dist.barrier()
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.ones(1000 * (rank + 1)))


def missing_rank(rank: int, clock: PhaseClock, folder: Path) -> None:
    """Rank 1 does not come to the last all-reduce, and is killed."""
    dist.barrier()
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1000))
    else:
        _wait_for_arrivals(folder, 1)
    os.kill(os.getpid(), signal.SIGKILL)
