"""The process group behind `init_process_group("paceline")`.

Sum and mean all-reduces, broadcasts, all-gathers and reduce-scatters of CPU tensors, and barriers,
use a paceline communicator: shared memory inside a host, gloo across hosts. All other operations
use a gloo group of the same ranks.

Large all-reduces run where they cost the caller least. If a host has no spare cores, that is inside
the call. If it has more cores than ranks, these would idle during the call, so gloo performs the
all-reduce on its own threads and overlaps it with computation. Across hosts, a communication thread
of this group performs it.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.nn  # its functions bind the first default group that they see
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # torch exports none of these
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ReduceOp,
    ReduceScatterOptions,
    Store,
)

from paceline.comm import hierarchical
from paceline.comm.background import CommunicationThread
from paceline.comm.buffers import chunk
from paceline.comm.communicator import Communicator
from paceline.comm.shm import segment
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.comm.work import Work
from paceline.errors import PeerError, SharedMemoryUnavailableError
from paceline.measure.machine import cores_usable
from paceline.torch_backend.work import BackgroundWork, CommunicatorWork, Gloo

LOOPBACK = "127.0.0.1"

KIND = "control"
"""Traffic kind of all transfers: a backend does not know the purpose of its tensors."""

LARGE_BYTES = 512 * 1024
"""Smaller all-reduces take less time than passing them to a thread."""

SHUTDOWN_TIMEOUT_SECONDS = 2.0
"""How long a rank that shuts down waits for the other ranks."""

SHUTDOWN_POLL_SECONDS = 0.001


class PacelineProcessGroup(dist.ProcessGroup):
    """Created by `init_process_group` and `new_group` of torch.distributed.

    Method names and arguments are those that torch.distributed and its C++ code use. Only one
    thread may use a group at a time.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        # C++ finds the methods only with this constructor, which torch's type stubs lack.
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        host_infos = exchange_host_infos(store, rank, world_size)
        address = address_for(host_infos)
        self._gloo = Gloo(store, rank, world_size, address, timeout)
        self._gloo.serve(self)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._communicator = connect(store, rank, host_infos, address, timeout)
        self._background: CommunicationThread | None = None
        self._has_spare_cores = False
        if are_on_one_host(host_infos):
            self._has_spare_cores = have_spare_cores(host_infos)
        else:
            self._background = CommunicationThread(self._communicator)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "paceline"

    def allreduce(self, *call: Any, **named: Any) -> dist.Work:
        match call:
            case [[tensor], AllreduceOptions() as options] if _are_plain(tensor):
                return self._all_reduce(tensor, options)
        return self._gloo.start("allreduce", *call, **named)

    def broadcast(self, *call: Any, **named: Any) -> dist.Work:
        match call:
            case [[tensor], BroadcastOptions() as options] if _are_plain(tensor):
                work = self._communicator.broadcast(tensor, options.rootRank, KIND)
                return CommunicatorWork(work, [tensor])
        return self._gloo.start("broadcast", *call, **named)

    def allgather(self, *call: Any, **named: Any) -> dist.Work:
        match call:
            case [[[*parts]], [tensor], *_] if self._are_even(parts, tensor):
                flat = tensor.new_empty(tensor.numel() * self.size())
                return CommunicatorWork(self._gather(tensor, flat, parts), parts)
        return self._gloo.start("allgather", *call, **named)

    def all_gather_single(self, *call: Any, **named: Any) -> dist.Work:
        match call:
            case [full, tensor, *_] if self._is_full(full, tensor) and full.is_contiguous():
                work = self._gather(tensor, full.detach().view(-1), [])
                return CommunicatorWork(work, [full])
        return self._gloo.start("_allgather_base", *call, **named)

    def reduce_scatter(self, *call: Any, **named: Any) -> dist.Work:
        match call:
            case [[tensor], [[*parts]], ReduceScatterOptions() as options] if _can_reduce(
                options, tensor
            ) and self._are_even(parts, tensor):
                flat = torch.cat([part.detach().reshape(-1) for part in parts])
                return CommunicatorWork(self._scatter(flat, tensor, options), [tensor])
        return self._gloo.start("reduce_scatter", *call, **named)

    def reduce_scatter_single(self, *call: Any, **named: Any) -> dist.Work:
        match call:
            case [tensor, full, ReduceScatterOptions() as options] if _can_reduce(
                options, tensor
            ) and self._is_full(full, tensor):
                flat = full.detach().clone(memory_format=torch.contiguous_format).view(-1)
                return CommunicatorWork(self._scatter(flat, tensor, options), [tensor])
        return self._gloo.start("_reduce_scatter_base", *call, **named)

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, *_: Any, **__: Any) -> dist.Work:
        return CommunicatorWork(self._communicator.barrier(), [])

    # PyTorch holds the GIL while it runs an operation that is not overridden here, and a gloo
    # thread that frees a tensor needs the GIL, which can deadlock. The bindings of gloo release the
    # GIL, so every operation that C++ looks up in Python is overridden.

    def allreduce_coalesced(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("allreduce_coalesced", *call, **named)

    def allgather_coalesced(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("allgather_coalesced", *call, **named)

    def allgather_into_tensor_coalesced(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("allgather_into_tensor_coalesced", *call, **named)

    def reduce_scatter_tensor_coalesced(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("reduce_scatter_tensor_coalesced", *call, **named)

    # Names since torch 2.13.
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("reduce", *call, **named)

    def gather(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("gather", *call, **named)

    def scatter(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("scatter", *call, **named)

    def alltoall(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("alltoall", *call, **named)

    def all_to_all_single(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("alltoall_base", *call, **named)

    alltoall_base = all_to_all_single

    def send(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("send", *call, **named)

    def recv(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("recv", *call, **named)

    def recv_anysource(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("recv_anysource", *call, **named)

    def shutdown(self) -> None:
        """Called by `destroy_process_group`; other ranks may still be working or have exited."""
        if not self._gloo.has_lost_peers:
            try:
                self._wait_for_others()
            except PeerError:
                self._gloo.has_lost_peers = True
        if self._gloo.has_lost_peers:
            self._gloo.abandon()
        self._close()

    def abort(self) -> None:
        self._gloo.abandon()
        self._close()

    def _wait_for_others(self) -> None:
        """Wait, with a timeout, until all ranks shut down."""
        barrier = self._communicator.barrier()
        deadline = monotonic() + SHUTDOWN_TIMEOUT_SECONDS
        while not barrier.is_completed() and monotonic() < deadline:
            sleep(SHUTDOWN_POLL_SECONDS)

    def _close(self) -> None:
        if self._background is not None:
            self._background.close()
        self._communicator.close()

    def _all_reduce(self, tensor: Tensor, options: Any) -> dist.Work:
        is_large = tensor.nbytes >= LARGE_BYTES
        if (is_large and self._has_spare_cores) or not _can_reduce(options, tensor):
            return self._gloo.all_reduce(tensor, options)
        if is_large and self._background is not None:
            return BackgroundWork(
                self._background,
                lambda duplicate: self._averaged(
                    duplicate.all_reduce(tensor, KIND), tensor, options
                ).wait(),
                [tensor],
            )
        work = self._communicator.all_reduce(tensor, KIND)
        return CommunicatorWork(self._averaged(work, tensor, options), [tensor])

    def _gather(self, tensor: Tensor, flat: Tensor, parts: Sequence[Tensor]) -> Work:
        """All-gather into a flat tensor, then copy it to `parts`, one per rank."""
        chunk(flat, self.size(), self.rank()).copy_(tensor.detach().reshape(-1))

        def copy_parts() -> None:
            for rank, part in enumerate(parts):
                _copy(chunk(flat, self.size(), rank), part)

        return self._communicator.all_gather(flat, KIND).on_success(copy_parts)

    def _scatter(self, flat: Tensor, tensor: Tensor, options: Any) -> Work:
        """Reduce-scatter a flat tensor and copy the chunk of this rank to `tensor`."""
        own = chunk(flat, self.size(), self.rank())
        work = self._communicator.reduce_scatter(flat, KIND)
        work.on_success(lambda: _copy(own, tensor))
        return self._averaged(work, tensor, options)

    def _averaged(self, work: Work, tensor: Tensor, options: Any) -> Work:
        if options.reduceOp == ReduceOp.AVG:
            work.on_success(lambda: _divide(tensor, self.size()))
        return work

    def _are_even(self, parts: Sequence[Tensor], tensor: Tensor) -> bool:
        """Return whether there is one part per rank, all of the same dtype and size."""
        return (
            len(parts) == self.size()
            and _are_plain(tensor, *parts)
            and all(part.numel() == tensor.numel() for part in parts)
        )

    def _is_full(self, full: Tensor, tensor: Tensor) -> bool:
        """Return whether `full` has the size of `tensor` times the number of ranks."""
        return _are_plain(full, tensor) and full.numel() == tensor.numel() * self.size()


@dataclass(frozen=True, slots=True)
class HostInfo:
    """Location of a rank, as far as other ranks need it."""

    host: str
    """Identifies processes that share memory and a network: the same machine or container."""
    cores: int

    @classmethod
    def own(cls) -> HostInfo:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        memory = segment.FOLDER.stat().st_dev
        network = Path("/proc/self/ns/net").stat().st_ino
        return cls(f"{machine} {memory} {network}", cores_usable())


def exchange_host_infos(store: Store, rank: int, world_size: int) -> list[HostInfo]:
    """Return the HostInfo of all ranks. Collective."""
    store.set(f"info/{rank}", json.dumps(asdict(HostInfo.own())))
    return [HostInfo(**json.loads(store.get(f"info/{each}"))) for each in range(world_size)]


def connect(
    store: Store, rank: int, host_infos: Sequence[HostInfo], address: str, timeout: timedelta
) -> Communicator:
    """Create the communicator: shared memory inside a host, gloo across hosts. Collective."""
    network = TorchCommunicator(
        PrefixStore("communicator", store),
        rank,
        len(host_infos),
        address=address,
        timeout_seconds=timeout.total_seconds(),
    )
    if len(host_infos) == 1:
        return network
    hosts = list(dict.fromkeys(info.host for info in host_infos))
    hierarchy: Communicator | None = None
    try:
        hierarchy = hierarchical.connect(network, hosts.index(host_infos[rank].host))
    except SharedMemoryUnavailableError as error:
        warnings.warn(
            f"paceline: using gloo instead of shared memory: {error.reason}", stacklevel=2
        )
    except BaseException:
        network.close()
        raise
    failures = torch.tensor([int(hierarchy is None)])
    network.all_reduce(failures, "control").wait()
    if hierarchy is None or failures:
        if hierarchy is not None:
            hierarchy.close()
        return network
    network.close()
    return hierarchy


def address_for(host_infos: Sequence[HostInfo]) -> str:
    """Return the address of this process: loopback if all ranks are on one host.

    Across hosts, the same rule as gloo: the interface named by GLOO_SOCKET_IFNAME, or the address
    of the host name.
    """
    if are_on_one_host(host_infos):
        return LOOPBACK
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    for each in psutil.net_if_addrs().get(interface, []):
        if each.family == socket.AF_INET:
            return each.address
    return socket.gethostname()


def are_on_one_host(host_infos: Sequence[HostInfo]) -> bool:
    return len({info.host for info in host_infos}) == 1


def have_spare_cores(host_infos: Sequence[HostInfo]) -> bool:
    """Return whether the host has more cores than ranks, which would idle during a call."""
    return min(info.cores for info in host_infos) > len(host_infos)


def _are_plain(*tensors: Tensor) -> bool:
    """Return whether all tensors are dense CPU tensors of the same dtype."""
    return all(
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype == tensors[0].dtype
        for tensor in tensors
    )


def _can_reduce(options: Any, tensor: Tensor) -> bool:
    """Return whether a communicator supports the reduction: any sum, or a mean of floats."""
    is_sum = bool(options.reduceOp == ReduceOp.SUM)
    is_mean = options.reduceOp == ReduceOp.AVG and tensor.is_floating_point()
    return (is_sum or is_mean) and _are_plain(tensor)


def _copy(source: Tensor, into: Tensor) -> None:
    into.detach().copy_(source.view(into.shape))


def _divide(tensor: Tensor, by: int) -> None:
    tensor.detach().div_(by)
