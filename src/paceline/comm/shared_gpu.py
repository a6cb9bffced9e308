"""Communicator for workers that share one GPU: collectives of GPU tensors stay in its memory.

They are the collectives of comm/shm with slots in GPU memory (cuda_ipc.py). Every rank submits its
copies and sums to a stream, in the order of the stages, and waits on the CPU only until the other
ranks have submitted theirs. The GPU runs the processes in turns, and never in a kernel that waits
for another process. Sums are in rank order, so they are bitwise equal on all ranks.

CPU tensors and messages use torch.distributed, as do GPU tensors if the workers cannot map each
other's memory, for example because they use different GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not export it

from paceline.comm.buffers import StagingBuffer
from paceline.comm.communicator import (
    Communicator,
    OperationContext,
    all_gather_counts,
    all_reduce_counts,
    broadcast_counts,
    reduce_scatter_counts,
)
from paceline.comm.cuda_ipc import CudaIpcMemory, DeviceMemory
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.shm.collectives import (
    SLOTS,
    STAGES,
    AllGather,
    Broadcast,
    Collective,
    CollectiveBuffers,
    OneShotAllReduce,
    ReduceScatter,
)
from paceline.comm.shm.communicator import total_cores
from paceline.comm.shm.futex import FutexSignals, is_supported
from paceline.comm.shm.progress import PendingWork, ProgressEngine
from paceline.comm.shm.segment import CACHE_LINE_BYTES, SharedSegment, aligned_offsets
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.comm.work import CompletedWork, Work
from paceline.errors import PeerError, SharedMemoryUnavailableError
from paceline.measure.timeline import Moment, timeline_of

CLOSING_SECONDS = 2.0
CLOSING_POLL_SECONDS = 0.001
SLOT_BYTES = 32 * 2**20
"""Each rank has `SLOTS` of them in each communicator that transfers GPU tensors."""


def connect(
    rendezvous: Rendezvous, device: torch.device, *, timeout_seconds: float
) -> SharedGpuCommunicator:
    """Join a rendezvous and connect to the other ranks, which may use the same GPU. Collective."""
    return SharedGpuCommunicator(
        rendezvous.join(),
        rendezvous.rank,
        rendezvous.world_size,
        address=rendezvous.local_address(),
        shared_gpu=device,
        timeout_seconds=timeout_seconds,
    )


class DeviceBuffers(CollectiveBuffers):
    """Slots in device memory. A stage counts as completed once its work is submitted."""

    def __init__(
        self,
        segment: SharedSegment,
        begin_byte: int,
        rank: int,
        world_size: int,
        slot_bytes: int,
        notify_all: Callable[[], None],
        memory: DeviceMemory,
    ) -> None:
        """Only the counters are in the segment."""
        super().__init__(
            segment, begin_byte, rank, world_size, slot_bytes, notify_all, memory.slots
        )
        self._device_memory = memory

    def copy(self, target: Tensor, source: Tensor) -> None:
        elements = min(target.numel(), source.numel())
        target[:elements].copy_(source[:elements])

    def acquire(self, stage: int, round_number: int) -> None:
        if round_number >= 0:
            self._device_memory.wait_for_peers(_event(stage, round_number))

    def publish(self, stage: int, round_number: int) -> None:
        self._device_memory.record(_event(stage, round_number))
        super().publish(stage, round_number)


def _event(stage: int, round_number: int) -> int:
    return stage * SLOTS + round_number % SLOTS


class RankOrderReduceScatter(ReduceScatter):
    """Sums in rank order, so that each element is equal to that of an all-reduce."""

    def reduce(self, round_index: int, slots: Sequence[Tensor]) -> None:
        own = self.part(round_index, self.rank)
        parts = [self._chunk_view(slot, self.rank, own.numel()) for slot in slots]
        parts[self.rank] = own
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total.add_(part)
        own.copy_(total)


class DeviceGroup:
    """The collectives of ranks that map the same device memory. Creating one is collective."""

    def __init__(
        self,
        bootstrap: Communicator,
        make_memory: Callable[[Communicator, int, int], DeviceMemory],
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """`make_memory` gets `bootstrap`, the bytes of a rank's slots and the number of events."""
        rank, world_size = bootstrap.rank, bootstrap.world_size
        (signals, counters), size_bytes = aligned_offsets(
            [FutexSignals.size_bytes(world_size), world_size * CACHE_LINE_BYTES]
        )
        segment = SharedSegment(bootstrap, size_bytes)
        # Last of what may fail, because exported memory is not freed by itself.
        self.memory = make_memory(bootstrap, SLOTS * slot_bytes, STAGES * SLOTS)
        self._signals = FutexSignals(segment, signals, rank, world_size, total_cores(bootstrap))
        notify_all = self._signals.notify_all
        self._engine = ProgressEngine(
            self._signals, bootstrap.timeout_seconds, bootstrap.global_ranks
        )
        self.buffers = DeviceBuffers(
            segment, counters, rank, world_size, slot_bytes, notify_all, self.memory
        )
        self._is_closed = False
        bootstrap.barrier().wait()
        self._signals.watch_peers()

    def start(self, collective: Collective, context: OperationContext) -> Work:
        self._engine.check(context)
        self.memory.follow_caller()
        operation = _DeviceOperation(collective, self.memory)
        return _DeviceWork(self._engine.start(operation, context), operation, self.memory)

    def close(self) -> None:
        """Release the memory, unless the device may wait forever for a peer that has exited."""
        if self._is_closed:
            return
        self._is_closed = True
        is_clean = not self._engine.has_failed and _wait_until(self.memory.is_idle)
        if is_clean:
            self.buffers.forget_slots()
            self.memory.unmap_peers()
        self._engine.close()
        if is_clean and _wait_until(lambda: self._signals.have_all_disconnected):
            self.memory.free()
        else:
            _abandoned.append(self.memory)


_abandoned: list[DeviceMemory] = []
"""Memory that was not released; it is freed when the process exits."""


def _wait_until(condition: Callable[[], bool]) -> bool:
    deadline = monotonic() + CLOSING_SECONDS
    while not condition():
        if monotonic() > deadline:
            return False
        sleep(CLOSING_POLL_SECONDS)
    return True


class _DeviceOperation:
    """A collective on the stream of the device memory."""

    def __init__(self, collective: Collective, memory: DeviceMemory) -> None:
        self._collective, self._memory = collective, memory
        self.end: Moment | None = None
        """Marks the last stage; None until it is submitted."""

    @property
    def is_complete(self) -> bool:
        return self.end is not None

    def progress(self) -> bool:
        if self.end is not None:
            return False
        with self._memory.stream():
            has_progressed = self._collective.progress()
            if self._collective.is_complete:
                self.end = self._memory.mark()
        return has_progressed


class _DeviceWork(Work):
    """A stream-ordered collective: `wait` blocks until all ranks have submitted their work."""

    def __init__(
        self, pending: PendingWork, operation: _DeviceOperation, memory: DeviceMemory
    ) -> None:
        super().__init__()
        self._pending, self._operation, self._memory = pending, operation, memory

    def _block(self) -> None:
        self._pending.wait()
        assert self._operation.end is not None
        self._memory.order_caller(self._operation.end)
        self._complete(self._operation.end)

    def _poll(self) -> bool:
        return self._pending.is_completed()


class SharedGpuCommunicator(TorchCommunicator):
    """Created by `connect`.

    Like NCCL, it connects eagerly, because collectives must start without blocking. Every
    communicator therefore takes GPU memory.
    """

    def __init__(self, *arguments: Any, shared_gpu: torch.device, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shared_gpu = shared_gpu
        self._timeline = timeline_of(shared_gpu)
        self._device_group: DeviceGroup | None = None
        if self.world_size > 1 and is_supported():
            self._device_group = self._connect()

    @property
    def shares_memory(self) -> bool:
        """Whether collectives of GPU tensors stay in GPU memory."""
        return self._device_group is not None

    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        counts = broadcast_counts(tensor, self.rank, self.world_size, root)
        return self._on_device(
            "broadcast with", tensor, kind, partial(Broadcast, root=root), counts
        ) or super().broadcast(tensor, root, kind)

    def reduce_scatter(self, tensor: Tensor, kind: str) -> Work:
        counts = reduce_scatter_counts(tensor, self.rank, self.world_size)
        return self._on_device(
            "reduce_scatter with", tensor, kind, RankOrderReduceScatter, counts
        ) or super().reduce_scatter(tensor, kind)

    def all_gather(self, tensor: Tensor, kind: str) -> Work:
        counts = all_gather_counts(tensor, self.rank, self.world_size)
        return self._on_device(
            "all_gather with", tensor, kind, AllGather, counts
        ) or super().all_gather(tensor, kind)

    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        counts = all_reduce_counts(tensor, self.rank, self.world_size)
        return self._on_device(
            "all_reduce with", tensor, kind, OneShotAllReduce, counts
        ) or super().all_reduce(tensor, kind)

    def capture_obstacle(self) -> str | None:
        is_single = self.world_size == 1
        return None if is_single else "workers that share a GPU synchronize through the CPU"

    def _on_device(
        self,
        name: str,
        tensor: Tensor,
        kind: str,
        create: Callable[[CollectiveBuffers, Tensor], Collective],
        counts: dict[str, int],
    ) -> Work | None:
        """Start a collective in GPU memory; return None if it is not possible for this tensor."""
        group = self._device_group
        if group is None or tensor.device != self.shared_gpu:
            return None
        if tensor.numel() == 0:
            return CompletedWork()
        context = self.context(name, self.peers)
        staged = StagingBuffer.from_tensor(tensor)
        transfer = self._begin(kind, tensor.device, **counts)
        try:
            work = group.start(create(group.buffers, staged.flat), context)
        except PeerError:
            self.traffic.end(transfer)
            raise
        return self.track_transfer(work, transfer).on_success(staged.copy_back)

    def _connect(self) -> DeviceGroup | None:
        group = None
        # Not this communicator, whose duplicates would connect in turn.
        with TorchCommunicator(
            PrefixStore("shared_gpu", self._store),
            self.rank,
            self.world_size,
            address=self._address,
            timeout_seconds=self.timeout_seconds,
            global_ranks=self.global_ranks,
        ) as bootstrap:
            # All ranks get the same error, so all of them use torch.distributed.
            with suppress(RuntimeError, SharedMemoryUnavailableError):
                group = self._connect_group(bootstrap)
            self.barrier().wait()
        return group

    def _connect_group(self, bootstrap: Communicator) -> DeviceGroup:
        return DeviceGroup(
            bootstrap, lambda each, *sizes: CudaIpcMemory(each, self.shared_gpu, *sizes)
        )

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "shared_gpu": self.shared_gpu}

    def _disconnect(self) -> None:
        if self._device_group is not None:
            self._device_group.close()
        super()._disconnect()
