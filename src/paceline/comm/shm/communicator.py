"""Workers of one host, connected by memory that all of them see.

Collectives go through outboxes (outbox.py), messages through slots (pair.py); both lie in one piece
of shared memory (arena.py), and workers wait for one another by bells (bell.py). Tensors from
`zeros` lie in shared memory themselves, and are summed there (blocks.py).

There is no thread. An operation begins when it is called, and goes on inside every later call of
the same communicator: on one host, to communicate is work for the same cores that compute. So an
operation larger than an outbox makes progress only while all workers are in some call.
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
from paceline.comm.shm.channels import SLOTS, ChannelTable, Transfer
from paceline.comm.shm.collectives import (
    PIECES,
    AllGather,
    AllReduceInPlace,
    Barrier,
    Broadcast,
    Collective,
    CollectiveBuffers,
    OneShotAllReduce,
    ReduceScatter,
    SymmetricMemory,
    TwoShotAllReduce,
)
from paceline.comm.shm.futex import FutexSignals, is_supported
from paceline.comm.shm.segment import CACHE_LINE_BYTES, OTHERWISE, SharedSegment, aligned_offsets
from paceline.comm.work import CompletedWork, Work
from paceline.errors import PeerError, UsageError
from paceline.measure.machine import cpu_quota
from paceline.measure.traffic import CountedTransfer, Traffic

MOST_PIECE_BYTES = 2**20
MOST_OUTBOXES_BYTES = 64 * 2**20
DIRECT_BYTES = 64 * 1024
"""Up to here, summing everything everywhere costs less than meeting once more."""
MOST_SLOT_BYTES = 256 * 1024
MOST_SLOTS_BYTES = 32 * 2**20

MOST_CORES = 4096

SEARCH_SECONDS = 0.005
"""The least time between two searches for peers that are gone, which read all their states."""

CPU = torch.device("cpu")


def connect(bootstrap: Communicator, traffic: Traffic | None = None) -> SharedMemoryCommunicator:
    """Connect ranks that are all on one node by shared memory. Collective.

    It counts into `traffic`, by default that of `bootstrap`, which may be closed afterwards.
    """
    communicator = SharedMemoryCommunicator(
        bootstrap, bootstrap.timeout_seconds, traffic or bootstrap.traffic
    )
    # After this barrier, no rank uses `bootstrap` any more.
    communicator.barrier().wait()
    return communicator


class SharedMemoryCommunicator(Communicator):
    """Made by `connect`."""

    def __init__(self, others: Communicator, timeout_seconds: float, traffic: Traffic) -> None:
        rank, world_size = others.rank, others.world_size
        super().__init__(rank, world_size, timeout_seconds, traffic, others.global_ranks)
        if not is_supported():
            raise UsageError(f"shared memory between workers needs Linux on x86-64: {OTHERWISE}")
        piece_bytes = _fair_bytes(MOST_PIECE_BYTES, MOST_OUTBOXES_BYTES, world_size * PIECES)
        slot_bytes = _fair_bytes(MOST_SLOT_BYTES, MOST_SLOTS_BYTES, world_size**2 * SLOTS)
        (bells, boxes, pairs), size_bytes = aligned_offsets(
            [
                FutexSignals.size_bytes(world_size),
                CollectiveBuffers.size_bytes(world_size, piece_bytes),
                ChannelTable.size_bytes(world_size, slot_bytes),
            ]
        )
        arena = SharedSegment(others, size_bytes)
        self._bells = FutexSignals(arena, bells, rank, world_size, _cores_of_all(others))
        ring, notify = self._bells.notify_all, self._bells.notify
        self._boxes = CollectiveBuffers(arena, boxes, rank, world_size, piece_bytes, ring)
        self._pairs = ChannelTable(arena, pairs, rank, world_size, slot_bytes, notify)
        self._blocks: list[SymmetricMemory] = []
        self._pending: deque[_Pending] = deque()
        self._failure: PeerError | None = None
        self._silent_since: float | None = None
        """When an operation was first asked about and nothing moved; nothing has moved since."""
        self._searched = 0.0
        """When `is_settled` last looked for peers that are gone."""
        self._is_closed = False
        others.barrier().wait()
        self._bells.watch_over_peers()

    def send(self, tensor: Tensor, to: int, kind: str) -> Work:
        self.check_peer(to)
        if tensor.numel() == 0:
            return CompletedWork()
        counted = self.traffic.begin(kind, bytes_sent=tensor.nbytes, messages=1)
        payload = StagingBuffer.of(tensor, CPU).flat.view(torch.uint8)
        transfer = Transfer(self._pairs.channel(self.rank, to), payload, sends=True)
        return self._begin(transfer, self.context("send to", (to,)), counted)

    def recv(self, tensor: Tensor, source: int, kind: str) -> Work:
        self.check_peer(source)
        if tensor.numel() == 0:
            return CompletedWork()
        counted = self.traffic.begin(kind, bytes_received=tensor.nbytes)
        staged = StagingBuffer.to_fill(tensor, CPU)
        payload = staged.flat.view(torch.uint8)
        transfer = Transfer(self._pairs.channel(source, self.rank), payload, sends=False)
        work = self._begin(transfer, self.context("recv from", (source,)), counted)
        return work.on_success(staged.copy_back)

    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        counts = broadcast_counts(tensor, self.rank, self.world_size, root)
        return self._collect(
            "broadcast with", tensor, kind, lambda flat: Broadcast(self._boxes, flat, root), counts
        )

    def reduce_scatter(self, tensor: Tensor, kind: str) -> Work:
        counts = reduce_scatter_counts(tensor, self.rank, self.world_size)
        return self._collect(
            "reduce_scatter with", tensor, kind, partial(ReduceScatter, self._boxes), counts
        )

    def all_gather(self, tensor: Tensor, kind: str) -> Work:
        counts = all_gather_counts(tensor, self.rank, self.world_size)
        return self._collect(
            "all_gather with", tensor, kind, partial(AllGather, self._boxes), counts
        )

    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        counts = all_reduce_counts(tensor, self.rank, self.world_size)
        return self._collect("all_reduce with", tensor, kind, self._sum_of, counts)

    def _sum_of(self, flat: Tensor) -> Collective:
        if flat.nbytes <= DIRECT_BYTES:
            return OneShotAllReduce(self._boxes, flat)
        for blocks in self._blocks:
            part = blocks.peer_views(flat)
            if part is not None:
                return AllReduceInPlace(self._boxes, part)
        # Two workers read no more by summing everything than by summing halves and taking halves.
        return (OneShotAllReduce if self.world_size == 2 else TwoShotAllReduce)(self._boxes, flat)

    def zeros(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """In shared memory, until this connection is closed and nobody has the tensor any more.

        Elsewhere if there is too little of it.
        """
        if device != CPU or self.world_size == 1 or elements == 0:
            return super().zeros(elements, dtype, device)
        try:
            self._blocks.append(SymmetricMemory(self, elements, dtype))
        except UsageError:
            # Too little room, of which all ranks hear: ordinary memory will do, with copies.
            return super().zeros(elements, dtype, device)
        return self._blocks[-1].own

    def barrier(self) -> Work:
        operation = self.context("barrier with", self.peers)
        return (
            CompletedWork()
            if self.world_size == 1
            else self._begin(Barrier(self._boxes), operation)
        )

    def dup(self, traffic: Traffic | None = None) -> Self:
        return type(self)(self, self.timeout_seconds, traffic or self.traffic)

    def _disconnect(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._bells.leave()
            self._blocks.clear()

    def _collect(
        self,
        name: str,
        tensor: Tensor,
        kind: str,
        make: Callable[[Tensor], Collective],
        counts: dict[str, int],
    ) -> Work:
        if self.world_size == 1 or tensor.numel() == 0:
            return CompletedWork()
        staged = StagingBuffer.of(tensor, CPU)
        counted = self.traffic.begin(kind, **counts)
        work = self._begin(make(staged.flat), self.context(name, self.peers), counted)
        return work.on_success(staged.copy_back)

    def _begin(
        self, steps: _Steps, operation: OperationContext, counted: CountedTransfer | None = None
    ) -> Work:
        """Start what was counted before, if it was."""
        if self._is_closed or self._failure is not None:
            if counted is not None:
                self.traffic.end(counted)
            raise self._failure or operation.failed("the connection was closed")
        work = _Pending(self, steps, operation)
        self._pending.append(work)
        self.progress()
        return work if counted is None else self.track_transfer(work, counted)

    @property
    def is_busy(self) -> bool:
        """Whether an operation is under way that may need this worker to go on."""
        return bool(self._pending)

    def progress(self) -> bool:
        """Take every operation as far as it goes; whether any of them moved."""
        moved = False
        for work in self._pending:
            if work.steps.progress():
                moved = True
                work.note_progress()
        if moved:
            self._silent_since = None
            while self._pending and self._pending[0].steps.is_complete:
                self._pending.popleft()
        return moved

    def complete(self, work: _Pending) -> None:
        """Go on until an operation is over; `PeerError` where a peer it needs is gone or silent."""
        last_moved = monotonic()
        while not work.steps.is_complete:
            if self._is_closed:
                self._failure = work.operation.failed("the connection was closed")
            if self._failure is not None:
                raise self._failure
            if self.progress() or self._bells.wait(self.progress):
                last_moved = monotonic()
            else:
                self._failure = self._find_failure(work.operation, monotonic() - last_moved)

    def is_settled(self, work: _Pending) -> bool:
        """Whether `complete` would return, or raise, at once."""
        self.progress()
        if work.steps.is_complete or self._is_closed:
            return True
        if self._failure is None:
            now = monotonic()
            if self._silent_since is None:
                self._silent_since = now
            if now - self._searched >= SEARCH_SECONDS:
                self._searched = now
                self._failure = self._find_failure(work.operation, now - self._silent_since)
        return self._failure is not None

    def _find_failure(self, operation: OperationContext, silent_seconds: float) -> PeerError | None:
        left, ended = ([self.global_ranks[peer] for peer in peers] for peers in self._bells.gone())
        gone = [peer for peer in operation.peers if peer in left or peer in ended]
        # What they did before they went still counts.
        if gone and not self.progress():
            cause = "its process has ended" if gone[0] in ended else "the connection was closed"
            return OperationContext(operation.rank, operation.name, (gone[0],)).failed(cause)
        if silent_seconds > self.timeout_seconds:
            return operation.timed_out(self.timeout_seconds)
        return None


class _Steps(Protocol):
    """An operation that never waits by itself."""

    @property
    def is_complete(self) -> bool: ...

    def progress(self) -> bool: ...


class _Pending(Work):
    def __init__(
        self, communicator: SharedMemoryCommunicator, steps: _Steps, operation: OperationContext
    ) -> None:
        super().__init__()
        self.steps, self.operation = steps, operation
        self._communicator = communicator

    def note_progress(self) -> None:
        """A step was done; after the last one the operation is complete."""
        if self.steps.is_complete:
            self._complete()

    def _block(self) -> None:
        self._communicator.complete(self)

    def _poll(self) -> bool:
        return self._communicator.is_settled(self)


def _cores_of_all(others: Communicator) -> int:
    """How many cores the workers have between them; each may be kept on some of them."""
    own = os.sched_getaffinity(0)
    cores = torch.zeros(MOST_CORES, dtype=torch.bool)
    cores[[core for core in own if core < MOST_CORES]] = True
    others.all_reduce(cores, "control").wait()
    quota = cpu_quota()
    return min(int(cores.sum()), math.floor(quota) if quota else MOST_CORES)


def _fair_bytes(most_bytes: int, most_bytes_of_all: int, parts: int) -> int:
    """The size of each of so many parts: a multiple of what any dtype and vector needs."""
    return max(CACHE_LINE_BYTES * 64, min(most_bytes, most_bytes_of_all // parts) // 4096 * 4096)
