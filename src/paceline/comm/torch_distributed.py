"""Workers connected by torch.distributed: gloo for tensors in main memory, NCCL for those on a GPU.

Every group has gloo. Where each worker has a GPU of its own (`gpu`), tensors on it go through NCCL;
otherwise, as when workers share a GPU, they are copied to main memory and back. The groups are made
directly from a store, so nothing here depends on torch.distributed's process-wide default group;
`default_process_group` makes that one for those who cannot do without, such as
DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch lists neither

from paceline.comm import communicator
from paceline.comm.buffers import StagingBuffer, chunk
from paceline.comm.communicator import (
    DEFAULT_TIMEOUT_SECONDS,
    Communicator,
    OperationContext,
)
from paceline.comm.process_groups import (
    SUMMABLE_DTYPES,
    GlooPointToPointWork,
    GlooWork,
    NcclWork,
    abort_gloo,
    attempt,
    create_gloo,
    create_nccl,
    sockets_on,
    start_nccl_messages,
)
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.work import CompletedWork, Work
from paceline.measure.timeline import Timeline, timeline_of
from paceline.measure.traffic import CountedTransfer, Traffic

CPU = torch.device("cpu")


def connect(
    meeting: Rendezvous,
    *,
    gpu: torch.device | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    traffic: Traffic | None = None,
) -> TorchCommunicator:
    """Meet the other workers and connect to each of them. `gpu`: this worker's own, for NCCL."""
    return TorchCommunicator(
        meeting.join(),
        meeting.rank,
        meeting.world_size,
        address=meeting.local_address(),
        gpu=gpu,
        timeout_seconds=timeout_seconds,
        traffic=traffic,
    )


class _ClosedError(Exception):
    """The communicator was closed, here or by another thread, before the operation started."""


class TorchCommunicator(Communicator):
    """Made by `connect`.

    Each one has its own gloo and NCCL connections, and so have those made by `dup` and `subgroup`.
    NCCL connects when the communicator is made, not on first use: then only the ranks with
    something to send would take part (process_groups.py). That costs GPU memory and some time for
    each communicator, even one that only carries tensors in main memory.
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
        self._forks = 0
        self._made_default_group = False
        self._closing = Lock()
        connecting = self.context("connect to", self.peers)
        self._gloo: Any = attempt(
            connecting,
            timeout_seconds,
            lambda: create_gloo(store, rank, world_size, address, timeout_seconds),
        )
        self._nccl: Any = None
        self._timeline: Timeline | None = None
        if gpu is not None:
            self._nccl = attempt(
                connecting,
                timeout_seconds,
                lambda: create_nccl(store, rank, world_size, address, gpu, timeout_seconds),
            )
            self._timeline = timeline_of(gpu)

    @property
    def gpu(self) -> torch.device | None:
        """This rank's own, whose tensors go through NCCL."""
        return self._gpu

    def send(self, tensor: Tensor, to: int, kind: str) -> Work:
        self.check_peer(to)
        if tensor.numel() == 0:
            return CompletedWork()
        flat = StagingBuffer.of(tensor, self._device(tensor)).flat
        transfer = self.traffic.begin(kind, bytes_sent=tensor.nbytes, messages=1)

        def start() -> Any:
            if flat.device != CPU:
                return start_nccl_messages(self._backend(flat.device), send=(flat, to))
            return self._backend(CPU).send([flat], to, 0)

        operation = self.context("send to", (to,))
        return self._start(operation, transfer, flat.device, start, GlooPointToPointWork)

    def recv(self, tensor: Tensor, source: int, kind: str) -> Work:
        self.check_peer(source)
        if tensor.numel() == 0:
            return CompletedWork()
        staged = StagingBuffer.to_fill(tensor, self._device(tensor))
        transfer = self.traffic.begin(kind, bytes_received=tensor.nbytes)

        def start() -> Any:
            if staged.flat.device != CPU:
                return start_nccl_messages(
                    self._backend(staged.flat.device), recv=(staged.flat, source)
                )
            return self._backend(CPU).recv([staged.flat], source, 0)

        operation = self.context("recv from", (source,))
        work = self._start(operation, transfer, staged.flat.device, start, GlooPointToPointWork)
        return work.on_success(staged.copy_back)

    def sendrecv(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, kind: str) -> Work:
        if self._device(outgoing) == CPU or 0 in (outgoing.numel(), incoming.numel()):
            return super().sendrecv(outgoing, to, incoming, source, kind)
        self.check_peer(to)
        self.check_peer(source)
        sending, receiving = StagingBuffer.of(outgoing), StagingBuffer.to_fill(incoming)
        transfer = self.traffic.begin(
            kind, bytes_sent=outgoing.nbytes, bytes_received=incoming.nbytes, messages=1
        )

        def start() -> Any:
            return start_nccl_messages(
                self._backend(sending.flat.device),
                send=(sending.flat, to),
                recv=(receiving.flat, source),
            )

        operation = self.context("exchange with", sorted({to, source}))
        work = self._start(operation, transfer, sending.flat.device, start, GlooPointToPointWork)
        return work.on_success(receiving.copy_back)

    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._collective(
            "broadcast with",
            tensor,
            kind,
            # As bytes, since gloo's broadcast does not know every dtype.
            lambda flat: self._backend(flat.device).broadcast([flat.view(torch.uint8)], options),
            communicator.broadcast_counts(tensor, self.rank, self.world_size, root),
        )

    def reduce_scatter(self, tensor: Tensor, kind: str) -> Work:
        # Gloo's own is a whole all-reduce of which all but a chunk is thrown away.
        if (
            self._device(tensor) == CPU
            or tensor.dtype not in SUMMABLE_DTYPES
            or not self._is_even(tensor)
        ):
            return super().reduce_scatter(tensor, kind)

        def start(flat: Tensor) -> Any:
            own = chunk(flat, self.world_size, self.rank)
            return self._backend(flat.device)._reduce_scatter_base(own, flat)

        counts = communicator.reduce_scatter_counts(tensor, self.rank, self.world_size)
        return self._collective("reduce_scatter with", tensor, kind, start, counts)

    def all_gather(self, tensor: Tensor, kind: str) -> Work:
        if not self._is_even(tensor):
            return super().all_gather(tensor, kind)

        def start(flat: Tensor) -> Any:
            own = chunk(flat, self.world_size, self.rank).clone()
            into, part = flat.view(torch.uint8), own.view(torch.uint8)
            return self._backend(flat.device)._allgather_base(into, part)

        counts = communicator.all_gather_counts(tensor, self.rank, self.world_size)
        return self._collective("all_gather with", tensor, kind, start, counts)

    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        if tensor.dtype not in SUMMABLE_DTYPES:
            return super().all_reduce(tensor, kind)

        def start(flat: Tensor) -> Any:
            return self._backend(flat.device).allreduce([flat])

        counts = communicator.all_reduce_counts(tensor, self.rank, self.world_size)
        return self._collective("all_reduce with", tensor, kind, start, counts)

    def dup(self) -> Self:
        self._forks += 1
        return type(self)(
            PrefixStore(f"fork/{self._forks}", self._store),
            self.rank,
            self.world_size,
            address=self._address,
            gpu=self._gpu,
            timeout_seconds=self.timeout_seconds,
            traffic=self.traffic,
            global_ranks=self.global_ranks,
        )

    def subgroup(self, ranks: Sequence[int]) -> Self:
        """A communicator over some of the workers, who all call this with the same ranks.

        They are numbered anew, in the order given. It counts into the same traffic. Whoever makes
        one closes it.
        """
        self._forks += 1
        return type(self)(
            PrefixStore(f"among/{self._forks}/{'-'.join(map(str, ranks))}", self._store),
            ranks.index(self.rank),
            len(ranks),
            address=self._address,
            gpu=self._gpu,
            timeout_seconds=self.timeout_seconds,
            traffic=self.traffic,
            global_ranks=[self.global_ranks[rank] for rank in ranks],
        )

    def default_process_group(self) -> dist.ProcessGroup:
        """torch.distributed's default group over the same workers, made when first asked for.

        Collective at first. For PyTorch's own wrappers; what goes through it is not counted here.
        """
        if not self._made_default_group:
            with sockets_on(self._address):
                dist.init_process_group(
                    "gloo" if self._gpu is None else "cpu:gloo,cuda:nccl",
                    store=PrefixStore("default", self._store),
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=timedelta(seconds=self.timeout_seconds),
                )
            self._made_default_group = True
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("somebody else has destroyed the default process group")
        return group

    def _disconnect(self) -> None:
        if self._made_default_group and dist.is_initialized():
            dist.destroy_process_group()
        # Taken once, since another thread may close the communicator at the same time.
        with self._closing:
            nccl, gloo = self._nccl, self._gloo
            self._nccl = self._gloo = None
        if nccl is not None:
            nccl.abort()
        if gloo is not None:
            abort_gloo(gloo, self.peers)

    def _collective(
        self,
        name: str,
        tensor: Tensor,
        kind: str,
        start: Callable[[Tensor], Any],
        counts: dict[str, int],
    ) -> Work:
        if self.world_size == 1 or tensor.numel() == 0:
            return CompletedWork()
        staged = StagingBuffer.of(tensor, self._device(tensor))
        transfer = self.traffic.begin(kind, **counts)
        operation = self.context(name, self.peers)
        work = self._start(
            operation, transfer, staged.flat.device, lambda: start(staged.flat), GlooWork
        )
        return work.on_success(staged.copy_back)

    def _start(
        self,
        operation: OperationContext,
        transfer: CountedTransfer,
        device: torch.device,
        action: Callable[[], Any],
        gloo_work: type[GlooPointToPointWork] | type[GlooWork],
    ) -> Work:
        """Start what was counted before, on the backend of the device.

        The action looks the backend up itself: a variable here would be kept by the traceback of a
        failure, and the connections with it.
        """
        try:
            handle = attempt(operation, self.timeout_seconds, action)
        except _ClosedError:
            self.traffic.end(transfer)
            raise operation.failed("this communicator is closed") from None
        except BaseException:
            self.traffic.end(transfer)
            raise
        if device == CPU:
            work: Work = gloo_work(handle, operation, self.timeout_seconds)
        else:
            timeline = self._timeline if gloo_work is GlooWork else None
            work = NcclWork(handle, operation, self.timeout_seconds, timeline)
        return self.track_transfer(work, transfer)

    def _backend(self, device: torch.device) -> Any:
        backend = self._gloo if device == CPU else self._nccl
        if backend is None:
            raise _ClosedError
        return backend

    def _device(self, tensor: Tensor) -> torch.device:
        """Where a tensor must be to be sent."""
        on_own_gpu = self._nccl is not None and tensor.device == self._gpu
        return tensor.device if on_own_gpu else CPU

    def _is_even(self, tensor: Tensor) -> bool:
        return tensor.numel() % self.world_size == 0
