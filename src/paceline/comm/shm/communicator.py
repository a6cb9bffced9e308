"""Communicator for the ranks of one node, over shared memory.

There is no progress thread: communication on one node uses the same cores as computation. An
operation starts when it is called and makes progress during every later call on the same
communicator. An operation larger than the slots therefore makes progress only while all ranks are
inside a call.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Protocol, Self

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

EXIT_CHECK_SECONDS = 0.005
"""Minimum time between checks for exited peers while polling; each check polls every peer."""

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
        self._signals = FutexSignals(segment, signals, rank, world_size, _total_cores(bootstrap))
        self._buffers = CollectiveBuffers(
            segment, buffers, rank, world_size, collective_slot_bytes, self._signals.notify_all
        )
        self._channels = ChannelTable(
            segment, channel_table, rank, world_size, channel_slot_bytes, self._signals.notify
        )
        self._symmetric_memory: list[SymmetricMemory] = []
        self._pending: deque[_PendingWork] = deque()
        self._failure: PeerError | None = None
        self._no_progress_since: float | None = None
        """Time of the first poll without progress; None after progress."""
        self._last_exit_check = 0.0
        self._is_closed = False
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
        if not self._is_closed:
            self._is_closed = True
            self._signals.disconnect()
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
        operation: _Operation,
        context: OperationContext,
        transfer: CountedTransfer | None = None,
    ) -> Work:
        if self._is_closed or self._failure is not None:
            if transfer is not None:
                self.traffic.end(transfer)
            raise self._failure or context.failed("the connection was closed")
        work = _PendingWork(self, operation, context)
        self._pending.append(work)
        self.progress()
        return work if transfer is None else self.track_transfer(work, transfer)

    @property
    def is_busy(self) -> bool:
        """Whether an operation that may need this rank is in progress."""
        return bool(self._pending)

    def progress(self) -> bool:
        """Make progress on all operations without blocking; return whether any progressed."""
        has_progressed = False
        for work in self._pending:
            if work.operation.progress():
                has_progressed = True
                work.complete_if_done()
        if has_progressed:
            self._no_progress_since = None
            while self._pending and self._pending[0].operation.is_complete:
                self._pending.popleft()
        return has_progressed

    def complete(self, work: _PendingWork) -> None:
        """Make progress until an operation is complete.

        Raises PeerError if a peer exits, disconnects or times out.
        """
        last_progress = monotonic()
        while not work.operation.is_complete:
            if self._is_closed:
                self._failure = work.context.failed("the connection was closed")
            if self._failure is not None:
                raise self._failure
            if self.progress() or self._signals.wait(self.progress):
                last_progress = monotonic()
            else:
                self._failure = self._find_failure(work.context, monotonic() - last_progress)

    def would_complete(self, work: _PendingWork) -> bool:
        """Return whether `complete` would return, or raise, without blocking."""
        self.progress()
        if work.operation.is_complete or self._is_closed:
            return True
        if self._failure is None:
            now = monotonic()
            if self._no_progress_since is None:
                self._no_progress_since = now
            if now - self._last_exit_check >= EXIT_CHECK_SECONDS:
                self._last_exit_check = now
                self._failure = self._find_failure(work.context, now - self._no_progress_since)
        return self._failure is not None

    def _find_failure(
        self, context: OperationContext, seconds_without_progress: float
    ) -> PeerError | None:
        disconnected, exited = (
            [self.global_ranks[peer] for peer in peers]
            for peers in self._signals.disconnected_and_exited_peers()
        )
        gone = [peer for peer in context.peers if peer in disconnected or peer in exited]
        # Data that a peer wrote before it disconnected or exited may still complete the operation.
        if gone and not self.progress():
            cause = "its process exited" if gone[0] in exited else "the connection was closed"
            return OperationContext(context.rank, context.name, (gone[0],)).failed(cause)
        if seconds_without_progress > self.timeout_seconds:
            return context.timed_out(self.timeout_seconds)
        return None


class _Operation(Protocol):
    """An operation that progresses without blocking: a collective, a barrier or a message."""

    @property
    def is_complete(self) -> bool: ...

    def progress(self) -> bool: ...


class _PendingWork(Work):
    def __init__(
        self,
        communicator: SharedMemoryCommunicator,
        operation: _Operation,
        context: OperationContext,
    ) -> None:
        super().__init__()
        self.operation, self.context = operation, context
        self._communicator = communicator

    def complete_if_done(self) -> None:
        if self.operation.is_complete:
            self._complete()

    def _block(self) -> None:
        self._communicator.complete(self)

    def _poll(self) -> bool:
        return self._communicator.would_complete(self)


def _total_cores(bootstrap: Communicator) -> int:
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
