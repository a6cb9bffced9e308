"""Communicator for the ranks of one node, over shared memory.

There is no progress thread (progress.py): communication on one node uses the same cores as
computation. An operation larger than the slots therefore makes progress only while all ranks are
inside a call.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import Tensor

from paceline.comm.buffers import StagingBuffer
from paceline.comm.communicator import (
    Communicator,
    OperationContext,
    all_gather_counts,
    all_reduce_counts,
    broadcast_counts,
    reduce_scatter_counts,
)
from paceline.comm.shm import channels, collectives
from paceline.comm.shm.channels import ChannelTable, Message
from paceline.comm.shm.collectives import (
    AllGather,
    Barrier,
    Broadcast,
    Collective,
    CollectiveBuffers,
    InPlaceAllReduce,
    OneShotAllReduce,
    ReduceScatter,
    SymmetricMemory,
    TwoShotAllReduce,
)
from paceline.comm.shm.futex import FutexSignals, is_supported
from paceline.comm.shm.progress import Operation, ProgressEngine
from paceline.comm.shm.segment import CACHE_LINE_BYTES, HINT, SharedSegment, aligned_offsets
from paceline.comm.work import CompletedWork, Work
from paceline.errors import PeerError, SharedMemoryUnavailableError
from paceline.measure.machine import cpu_quota
from paceline.measure.traffic import CountedTransfer, Traffic

MAX_COLLECTIVE_SLOT_BYTES = 2**20
MAX_COLLECTIVE_BYTES = 64 * 2**20
"""Maximum total size of the collective slots of all ranks."""
MAX_CHANNEL_SLOT_BYTES = 256 * 1024
MAX_CHANNEL_BYTES = 32 * 2**20
"""Maximum total size of the slots of all channels."""

ONE_SHOT_BYTES = 64 * 1024
"""Up to this size, summing the whole tensor on every rank beats another synchronization."""

MAX_CORES = 4096

CPU = torch.device("cpu")


def connect(bootstrap: Communicator, traffic: Traffic | None = None) -> SharedMemoryCommunicator:
    """Connect ranks that are all on one node through shared memory. Collective.

    Transfers are counted in `traffic`, by default that of `bootstrap`, which may be closed
    afterward.
    """
    communicator = SharedMemoryCommunicator(
        bootstrap, bootstrap.timeout_seconds, traffic or bootstrap.traffic
    )
    # After this barrier, no rank uses `bootstrap` anymore.
    communicator.barrier().wait()
    return communicator


class SharedMemoryCommunicator(Communicator):
    """Created by `connect`."""

    def __init__(self, bootstrap: Communicator, timeout_seconds: float, traffic: Traffic) -> None:
        rank, world_size = bootstrap.rank, bootstrap.world_size
        super().__init__(rank, world_size, timeout_seconds, traffic, bootstrap.global_ranks)
        if not is_supported():
            raise SharedMemoryUnavailableError(
                "shared memory between workers requires Linux on x86-64", HINT
            )
        collective_slot_bytes = _slot_bytes(
            MAX_COLLECTIVE_SLOT_BYTES, MAX_COLLECTIVE_BYTES, world_size * collectives.SLOTS
        )
        channel_slot_bytes = _slot_bytes(
            MAX_CHANNEL_SLOT_BYTES, MAX_CHANNEL_BYTES, world_size**2 * channels.SLOTS
        )
        (signals, buffers, channel_table), size_bytes = aligned_offsets(
            [
                FutexSignals.size_bytes(world_size),
                CollectiveBuffers.size_bytes(world_size, collective_slot_bytes),
                ChannelTable.size_bytes(world_size, channel_slot_bytes),
            ]
        )
        segment = SharedSegment(bootstrap, size_bytes)
        self._signals = FutexSignals(segment, signals, rank, world_size, total_cores(bootstrap))
        self._buffers = CollectiveBuffers(
            segment, buffers, rank, world_size, collective_slot_bytes, self._signals.notify_all
        )
        self._channels = ChannelTable(
            segment, channel_table, rank, world_size, channel_slot_bytes, self._signals.notify
        )
        self._symmetric_memory: list[SymmetricMemory] = []
        self._engine = ProgressEngine(self._signals, timeout_seconds, self.global_ranks)
        bootstrap.barrier().wait()
        self._signals.watch_peers()

    def send(self, tensor: Tensor, to: int, kind: str) -> Work:
        self.check_peer(to)
        if tensor.numel() == 0:
            return CompletedWork()
        transfer = self.traffic.begin(kind, bytes_sent=tensor.nbytes, messages=1)
        payload = StagingBuffer.from_tensor(tensor, CPU).flat.view(torch.uint8)
        message = Message(self._channels.channel(self.rank, to), payload, sends=True)
        return self._start(message, self.context("send to", (to,)), transfer)

    def recv(self, tensor: Tensor, source: int, kind: str) -> Work:
        self.check_peer(source)
        if tensor.numel() == 0:
            return CompletedWork()
        transfer = self.traffic.begin(kind, bytes_received=tensor.nbytes)
        staged = StagingBuffer.empty_like(tensor, CPU)
        payload = staged.flat.view(torch.uint8)
        message = Message(self._channels.channel(source, self.rank), payload, sends=False)
        work = self._start(message, self.context("recv from", (source,)), transfer)
        return work.on_success(staged.copy_back)

    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        counts = broadcast_counts(tensor, self.rank, self.world_size, root)
        return self._collective(
            "broadcast with",
            tensor,
            kind,
            lambda flat: Broadcast(self._buffers, flat, root),
            counts,
        )

    def reduce_scatter(self, tensor: Tensor, kind: str) -> Work:
        counts = reduce_scatter_counts(tensor, self.rank, self.world_size)
        create = partial(ReduceScatter, self._buffers)
        return self._collective("reduce_scatter with", tensor, kind, create, counts)

    def all_gather(self, tensor: Tensor, kind: str) -> Work:
        counts = all_gather_counts(tensor, self.rank, self.world_size)
        create = partial(AllGather, self._buffers)
        return self._collective("all_gather with", tensor, kind, create, counts)

    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        counts = all_reduce_counts(tensor, self.rank, self.world_size)
        return self._collective("all_reduce with", tensor, kind, self._choose_all_reduce, counts)

    def _choose_all_reduce(self, flat: Tensor) -> Collective:
        if flat.nbytes <= ONE_SHOT_BYTES:
            return OneShotAllReduce(self._buffers, flat)
        for memory in self._symmetric_memory:
            views = memory.peer_views(flat)
            if views is not None:
                return InPlaceAllReduce(self._buffers, views)
        # With two ranks, one-shot reads no more data than two-shot.
        all_reduce = OneShotAllReduce if self.world_size == 2 else TwoShotAllReduce
        return all_reduce(self._buffers, flat)

    def zeros(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate in shared memory, or in regular memory if there is not enough shared memory.

        The memory is freed once this communicator is closed and the tensor is deallocated.
        """
        if device != CPU or self.world_size == 1 or elements == 0:
            return super().zeros(elements, dtype, device)
        try:
            self._symmetric_memory.append(SymmetricMemory(self, elements, dtype))
        except SharedMemoryUnavailableError:
            # All ranks get this error, so all of them use regular memory.
            return super().zeros(elements, dtype, device)
        return self._symmetric_memory[-1].own

    def barrier(self) -> Work:
        if self.world_size == 1:
            return CompletedWork()
        return self._start(Barrier(self._buffers), self.context("barrier with", self.peers))

    def dup(self, traffic: Traffic | None = None) -> Self:
        return type(self)(self, self.timeout_seconds, traffic or self.traffic)

    def _disconnect(self) -> None:
        self._engine.close()
        self._symmetric_memory.clear()

    def _collective(
        self,
        name: str,
        tensor: Tensor,
        kind: str,
        create: Callable[[Tensor], Collective],
        counts: dict[str, int],
    ) -> Work:
        if self.world_size == 1 or tensor.numel() == 0:
            return CompletedWork()
        staged = StagingBuffer.from_tensor(tensor, CPU)
        transfer = self.traffic.begin(kind, **counts)
        work = self._start(create(staged.flat), self.context(name, self.peers), transfer)
        return work.on_success(staged.copy_back)

    def _start(
        self,
        operation: Operation,
        context: OperationContext,
        transfer: CountedTransfer | None = None,
    ) -> Work:
        try:
            self._engine.check(context)
        except PeerError:
            if transfer is not None:
                self.traffic.end(transfer)
            raise
        work = self._engine.start(operation, context)
        return work if transfer is None else self.track_transfer(work, transfer)

    @property
    def is_busy(self) -> bool:
        """Whether an operation that may need this rank is in progress."""
        return self._engine.is_busy

    def progress(self) -> bool:
        """Make progress on all operations without blocking; return whether any progressed."""
        return self._engine.progress()


def total_cores(bootstrap: Communicator) -> int:
    """Return the total number of cores available to all ranks. Collective.

    Ranks may be pinned to different cores.
    """
    cores = torch.zeros(MAX_CORES, dtype=torch.bool)
    cores[[core for core in os.sched_getaffinity(0) if core < MAX_CORES]] = True
    bootstrap.all_reduce(cores, "control").wait()
    quota = cpu_quota()
    return min(int(cores.sum()), math.floor(quota) if quota else MAX_CORES)


def _slot_bytes(max_slot_bytes: int, max_total_bytes: int, slots: int) -> int:
    """Return the size of each slot: a multiple of 4096, aligned for any dtype and SIMD width."""
    size_bytes = min(max_slot_bytes, max_total_bytes // slots) // 4096 * 4096
    return max(CACHE_LINE_BYTES * 64, size_bytes)
