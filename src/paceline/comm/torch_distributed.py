"""Communicator over torch.distributed: gloo for CPU tensors, NCCL for tensors on a GPU.

Every communicator has a gloo process group. If each rank has its own GPU (`gpu`), tensors on that
GPU use NCCL. Otherwise, GPU tensors are copied to CPU memory and back; shared_gpu.py avoids that
for ranks that share a GPU. Process groups are created directly from a store and are independent of
the default process group of torch.distributed. `default_process_group` creates the default group
for PyTorch wrappers that require it, such as DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock, Thread
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports neither

from paceline.comm.buffers import StagingBuffer, chunk
from paceline.comm.communicator import (
    DEFAULT_TIMEOUT_SECONDS,
    Communicator,
    OperationContext,
    all_gather_counts,
    all_reduce_counts,
    broadcast_counts,
    reduce_scatter_counts,
)
from paceline.comm.process_groups import (
    SUMMABLE_DTYPES,
    PeerErrorTranslator,
    abort_gloo,
    communication_priority,
    create_gloo,
    create_nccl,
    start_nccl_messages,
    starting_gloo,
    use_interface_of,
)
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.stream_monitor import ReplayWatcher, StreamMonitor
from paceline.comm.work import CompletedWork, Work
from paceline.errors import PeerError
from paceline.measure.timeline import Interval, Moment, Timeline, is_capturing, timeline_of
from paceline.measure.traffic import CountedTransfer, Traffic

CPU = torch.device("cpu")


def connect(
    rendezvous: Rendezvous,
    *,
    gpu: torch.device | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    traffic: Traffic | None = None,
) -> TorchCommunicator:
    """Join a rendezvous and connect to the other ranks. Collective.

    `gpu` is the GPU that only this rank uses; its tensors use NCCL.
    """
    return TorchCommunicator(
        rendezvous.join(),
        rendezvous.rank,
        rendezvous.world_size,
        address=rendezvous.local_address(),
        gpu=gpu,
        timeout_seconds=timeout_seconds,
        traffic=traffic,
    )


class ProcessGroupWork(Work):
    """An operation of a process group. Wraps the handle that the group returned."""

    def __init__(self, handle: Any, context: OperationContext, timeout_seconds: float) -> None:
        super().__init__()
        self._handle, self._context, self._timeout_seconds = handle, context, timeout_seconds


class GlooWork(ProcessGroupWork):
    """A gloo collective."""

    def add_done_callback(self, action: Callable[[Moment], None]) -> None:
        is_first = not self._on_completion
        super().add_done_callback(action)
        if is_first:
            self._handle.get_future().then(lambda _: self._complete())

    def _block(self) -> None:
        with PeerErrorTranslator(self._context, self._timeout_seconds):
            self._handle.wait()

    def _poll(self) -> bool:
        return bool(self._handle.is_completed())


class GlooPointToPointWork(ProcessGroupWork):
    """A gloo send or receive, whose handle reports completion only to a waiting thread.

    The first `is_completed` call therefore starts a waiting thread.
    """

    _waiter: Thread | None = None
    _wait_error: RuntimeError | None = None

    def _block(self) -> None:
        with PeerErrorTranslator(self._context, self._timeout_seconds):
            if self._waiter is None:
                self._handle.wait()
                return
            self._waiter.join()
            if self._wait_error is not None:
                raise self._wait_error

    def _poll(self) -> bool:
        if self._waiter is None:
            self._waiter = Thread(target=self._wait, name="paceline-poll", daemon=True)
            self._waiter.start()
        return not self._waiter.is_alive()

    def _wait(self) -> None:
        try:
            self._handle.wait()
        except RuntimeError as error:
            self._wait_error = error


class NcclWork(ProcessGroupWork):
    """A stream-ordered NCCL operation: `wait` does not block the host."""

    def __init__(
        self,
        handle: Any,
        context: OperationContext,
        timeout_seconds: float,
        timeline: Timeline,
        tensors: Sequence[Tensor] = (),
    ) -> None:
        """`timeline` is the GPU's.

        `tensors` are kept until `wait()`: the handle releases its own references when any stream
        waits, and their memory could be reused before the operation has read it.
        """
        super().__init__(handle, context, timeout_seconds)
        self._timeline = timeline
        self._tensors = tensors

    def add_done_callback(self, action: Callable[[Moment], None]) -> None:
        # Without a callback, the mark of `_block` is good enough.
        if self._completed is None:
            self._complete(self._timeline.mark_behind(self._handle.wait))
        super().add_done_callback(action)

    def _block(self) -> None:
        with PeerErrorTranslator(self._context, self._timeout_seconds):
            self._handle.wait()
        self._tensors = ()
        if self._completed is None:
            self._complete(self._timeline.mark())
        else:
            self._timeline.join()

    def _poll(self) -> bool:
        return bool(self._handle.is_completed())


class _ClosedError(Exception):
    """The communicator was closed, possibly by another thread, before the operation started."""


class _StartingOperation(PeerErrorTranslator):
    """Context manager for starting an operation.

    On failure, it ends the transfer and translates the error.
    """

    __slots__ = ("_traffic", "_transfer")

    def __init__(
        self, communicator: Communicator, context: OperationContext, transfer: CountedTransfer
    ) -> None:
        super().__init__(context, communicator.timeout_seconds)
        self._traffic, self._transfer = communicator.traffic, transfer

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            return
        self._traffic.end(self._transfer)
        if isinstance(error, _ClosedError):
            raise self._context.failed("this communicator is closed") from None
        super().__exit__(_type, error, _traceback)


class TorchCommunicator(Communicator):
    """Created by `connect`.

    Each communicator has its own gloo and NCCL connections, including those created by `dup` and
    `subgroup`. NCCL connects eagerly, because only the ranks that send would take part in a lazy
    connection (process_groups.py). This costs GPU memory and startup time for every communicator,
    even if it only transfers CPU tensors.

    Methods never assign a process group to a local variable: the traceback of an error would keep
    its connections open.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        address: str,
        gpu: torch.device | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        traffic: Traffic | None = None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, world_size, timeout_seconds, traffic, global_ranks)
        self._store, self._address, self._gpu = store, address, gpu
        self._children = 0
        self._created_default_group = False
        self._closing = Lock()
        self._gloo: Any = None
        self._nccl: Any = None
        self._timeline: Timeline | None = None
        self._monitor = StreamMonitor(timeout_seconds, self._fail)
        self._failure: PeerError | None = None
        with PeerErrorTranslator(self.context("connect to", self.peers), timeout_seconds):
            self._gloo = create_gloo(store, rank, world_size, address, timeout_seconds)
            if gpu is not None:
                self._nccl = create_nccl(store, rank, world_size, address, gpu, timeout_seconds)
        if gpu is not None:
            self._timeline = timeline_of(gpu)

    @property
    def gpu(self) -> torch.device | None:
        """The GPU that only this rank uses; its tensors use NCCL."""
        return self._gpu

    def send(self, tensor: Tensor, to: int, kind: str) -> Work:
        self.check_peer(to)
        if tensor.numel() == 0:
            return CompletedWork()
        flat = StagingBuffer.from_tensor(tensor, self._device(tensor)).flat
        context = self.context("send to", (to,))
        transfer = self._begin(kind, flat.device, bytes_sent=tensor.nbytes, messages=1)
        with _StartingOperation(self, context, transfer):
            if flat.device == CPU:
                with communication_priority(self._address):
                    handle = self._group(CPU).send([flat], to, 0)
            else:
                handle = start_nccl_messages(self._group(flat.device), send=(flat, to))
        return self._message(handle, context, transfer, flat)

    def recv(self, tensor: Tensor, source: int, kind: str) -> Work:
        self.check_peer(source)
        if tensor.numel() == 0:
            return CompletedWork()
        staged = StagingBuffer.empty_like(tensor, self._device(tensor))
        flat = staged.flat
        context = self.context("recv from", (source,))
        transfer = self._begin(kind, flat.device, bytes_received=tensor.nbytes)
        with _StartingOperation(self, context, transfer):
            if flat.device == CPU:
                with communication_priority(self._address):
                    handle = self._group(CPU).recv([flat], source, 0)
            else:
                handle = start_nccl_messages(self._group(flat.device), recv=(flat, source))
        return self._message(handle, context, transfer, flat).on_success(staged.copy_back)

    def sendrecv(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, kind: str) -> Work:
        if self._device(outgoing) == CPU or 0 in (outgoing.numel(), incoming.numel()):
            return super().sendrecv(outgoing, to, incoming, source, kind)
        self.check_peer(to)
        self.check_peer(source)
        sending, receiving = StagingBuffer.from_tensor(outgoing), StagingBuffer.empty_like(incoming)
        device = sending.flat.device
        context = self.context("sendrecv with", sorted({to, source}))
        transfer = self._begin(
            kind, device, bytes_sent=outgoing.nbytes, bytes_received=incoming.nbytes, messages=1
        )
        with _StartingOperation(self, context, transfer):
            handle = start_nccl_messages(
                self._group(device), send=(sending.flat, to), recv=(receiving.flat, source)
            )
        tensors = sending.flat, receiving.flat
        return self._message(handle, context, transfer, *tensors).on_success(receiving.copy_back)

    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        if self.world_size == 1 or tensor.numel() == 0:
            return CompletedWork()
        staged = StagingBuffer.from_tensor(tensor, self._device(tensor))
        options = dist.BroadcastOptions()
        options.rootRank = root
        context = self.context("broadcast with", self.peers)
        counts = broadcast_counts(tensor, self.rank, self.world_size, root)
        transfer = self._begin(kind, staged.flat.device, **counts)
        with _StartingOperation(self, context, transfer):
            # Broadcast bytes, because gloo does not support every dtype.
            handle = self._group(staged.flat.device).broadcast(
                [staged.flat.view(torch.uint8)], options
            )
        return self._collective(handle, context, transfer, staged)

    def reduce_scatter(self, tensor: Tensor, kind: str) -> Work:
        # Gloo performs a full all-reduce and discards all chunks except one.
        if (
            self._device(tensor) == CPU
            or tensor.dtype not in SUMMABLE_DTYPES
            or not self._divides_evenly(tensor)
        ):
            return super().reduce_scatter(tensor, kind)
        if self.world_size == 1 or tensor.numel() == 0:
            return CompletedWork()
        staged = StagingBuffer.from_tensor(tensor, self._device(tensor))
        own = chunk(staged.flat, self.world_size, self.rank)
        context = self.context("reduce_scatter with", self.peers)
        counts = reduce_scatter_counts(tensor, self.rank, self.world_size)
        transfer = self._begin(kind, staged.flat.device, **counts)
        with _StartingOperation(self, context, transfer):
            handle = self._group(staged.flat.device)._reduce_scatter_base(own, staged.flat)
        return self._collective(handle, context, transfer, staged)

    def all_gather(self, tensor: Tensor, kind: str) -> Work:
        if not self._divides_evenly(tensor):
            return super().all_gather(tensor, kind)
        if self.world_size == 1 or tensor.numel() == 0:
            return CompletedWork()
        staged = StagingBuffer.from_tensor(tensor, self._device(tensor))
        own = chunk(staged.flat, self.world_size, self.rank).clone()
        context = self.context("all_gather with", self.peers)
        counts = all_gather_counts(tensor, self.rank, self.world_size)
        transfer = self._begin(kind, staged.flat.device, **counts)
        with _StartingOperation(self, context, transfer):
            handle = self._group(staged.flat.device)._allgather_base(
                staged.flat.view(torch.uint8), own.view(torch.uint8)
            )
        return self._collective(handle, context, transfer, staged, own)

    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        if tensor.dtype not in SUMMABLE_DTYPES:
            return super().all_reduce(tensor, kind)
        if self.world_size == 1 or tensor.numel() == 0:
            return CompletedWork()
        staged = StagingBuffer.from_tensor(tensor, self._device(tensor))
        context = self.context("all_reduce with", self.peers)
        counts = all_reduce_counts(tensor, self.rank, self.world_size)
        transfer = self._begin(kind, staged.flat.device, **counts)
        with _StartingOperation(self, context, transfer):
            handle = self._group(staged.flat.device).allreduce([staged.flat])
        return self._collective(handle, context, transfer, staged)

    def dup(self, traffic: Traffic | None = None) -> Self:
        self._children += 1
        return type(self)(
            PrefixStore(f"dup/{self._children}", self._store),
            self.rank,
            self.world_size,
            traffic=traffic or self.traffic,
            global_ranks=self.global_ranks,
            **self._options(),
        )

    def subgroup(self, ranks: Sequence[int], traffic: Traffic | None = None) -> Self:
        self._children += 1
        return type(self)(
            PrefixStore(f"subgroup/{self._children}/{'-'.join(map(str, ranks))}", self._store),
            ranks.index(self.rank),
            len(ranks),
            traffic=traffic or self.traffic,
            global_ranks=[self.global_ranks[rank] for rank in ranks],
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        """Return the constructor's arguments for a communicator of the same kind."""
        return {
            "address": self._address,
            "gpu": self._gpu,
            "timeout_seconds": self.timeout_seconds,
        }

    def default_process_group(self) -> dist.ProcessGroup:
        """Return torch.distributed's default group over the same ranks; create it on first use.

        The first call is collective. The group is for PyTorch wrappers, whose traffic is not
        counted.
        """
        if not self._created_default_group:
            with use_interface_of(self._address), starting_gloo(self._address):
                dist.init_process_group(
                    "gloo" if self._gpu is None else "cpu:gloo,cuda:nccl",
                    store=PrefixStore("default", self._store),
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=timedelta(seconds=self.timeout_seconds),
                )
            self._created_default_group = True
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("the default process group was destroyed by other code")
        return group

    def capture_obstacle(self) -> str | None:
        return super().capture_obstacle() if self._nccl is None else None

    def replay_observers(self) -> list[Any]:
        watcher = (
            []
            if self._gpu is None
            else [ReplayWatcher(self._monitor, self.context("captured step with", self.peers))]
        )
        return [*super().replay_observers(), *watcher]

    def synchronize(self) -> None:
        self._monitor.synchronize()
        if self._failure is not None:
            raise self._failure

    def _disconnect(self) -> None:
        self._monitor.close()
        if self._created_default_group and dist.is_initialized():
            dist.destroy_process_group()
        self._abort()

    def _fail(self, error: PeerError) -> None:
        """Handle the failure of an operation after its `wait`: later calls raise its error."""
        self._failure = error
        self._abort()

    def _abort(self) -> None:
        # If several threads close the communicator at the same time, only one of them aborts.
        with self._closing:
            nccl, gloo = self._nccl, self._gloo
            self._nccl = self._gloo = None
        if nccl is not None:
            nccl.abort()
        if gloo is not None:
            abort_gloo(gloo, self.peers)

    def _begin(self, kind: str, device: torch.device, **counts: int) -> CountedTransfer:
        """Count a transfer that starts now, from a device."""
        timeline = None if device == CPU else self._timeline
        return self.traffic.begin(kind, Interval.begin(timeline) if timeline else None, **counts)

    def _collective(
        self,
        handle: Any,
        context: OperationContext,
        transfer: CountedTransfer,
        staged: StagingBuffer,
        *tensors: Tensor,
    ) -> Work:
        """`tensors` are what the operation reads or writes besides `staged`."""
        if staged.flat.device == CPU:
            work: Work = GlooWork(handle, context, self.timeout_seconds)
        else:
            work = self._stream_work(handle, context, [staged.flat, *tensors])
        return self.track_transfer(work, transfer).on_success(staged.copy_back)

    def _message(
        self,
        handle: Any,
        context: OperationContext,
        transfer: CountedTransfer,
        *tensors: Tensor,
    ) -> Work:
        if tensors[0].device == CPU:
            work: Work = GlooPointToPointWork(handle, context, self.timeout_seconds)
        else:
            work = self._stream_work(handle, context, tensors)
        return self.track_transfer(work, transfer)

    def _stream_work(
        self, handle: Any, context: OperationContext, tensors: Sequence[Tensor]
    ) -> Work:
        assert self._timeline is not None
        if not is_capturing():
            self._monitor.watch(handle, context)
        return NcclWork(handle, context, self.timeout_seconds, self._timeline, tensors)

    def _group(self, device: torch.device) -> Any:
        if self._failure is not None:
            raise self._failure
        group = self._gloo if device == CPU else self._nccl
        if group is None:
            raise _ClosedError
        return group

    def _device(self, tensor: Tensor) -> torch.device:
        """Return the device from which a tensor is sent."""
        return tensor.device if tensor.device == self._gpu else CPU

    def _divides_evenly(self, tensor: Tensor) -> bool:
        return tensor.numel() % self.world_size == 0
