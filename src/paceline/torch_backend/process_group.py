"""The quickest connection between the members of a group, whichever hosts they are on.

The process group behind `init_process_group("paceline")`.

One rule says what goes which way: sums and means, broadcasts, all-gathers and reduce-scatters of
tensors in main memory, and barriers, go through a communicator of paceline's, which is shared
memory inside a host; everything else goes through a gloo group of the same members.

Large sums are exchanged where they cost the caller least. Where there is a core for each member,
that is inside the call. Where there are more, they would idle meanwhile, so it is left to gloo,
whose threads hide it; and across hosts it is done by a thread of this group's."""

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
import torch.distributed.nn  # whose functions keep for good the default group that they first see
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # torch lists neither  # type: ignore[attr-defined]  # torch lists none of these
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
from paceline.errors import PeerError, UsageError
from paceline.measure.machine import cores_usable
from paceline.torch_backend.work import BackgroundWork, CommunicatorWork, Gloo

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class HostInfo:
    """What the others need to know of where a member is."""

    host: str
    """What processes have in common that share memory and a network: machine, or container."""
    cores: int

    @classmethod
    def own(cls) -> HostInfo:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        memory = segment.FOLDER.stat().st_dev
        network = Path("/proc/self/ns/net").stat().st_ino
        return cls(f"{machine} {memory} {network}", cores_usable())


def exchange_seats(store: Store, rank: int, world_size: int) -> list[HostInfo]:
    """Those of all ranks. Collective."""
    store.set(f"seat/{rank}", json.dumps(asdict(HostInfo.own())))
    return [HostInfo(**json.loads(store.get(f"seat/{each}"))) for each in range(world_size)]


def connect(
    store: Store, rank: int, seats: Sequence[HostInfo], address: str, timeout: timedelta
) -> Communicator:
    """Shared memory inside a host, gloo across hosts. Collective."""
    network = TorchCommunicator(
        PrefixStore("communicator", store),
        rank,
        len(seats),
        address=address,
        timeout_seconds=timeout.total_seconds(),
    )
    if len(seats) == 1:
        return network
    hosts = list(dict.fromkeys(seat.host for seat in seats))
    quicker: Communicator | None = None
    try:
        quicker = hierarchical.connect(network, hosts.index(seats[rank].host))
    except UsageError as error:
        cause = str(error).removesuffix(segment.OTHERWISE).removesuffix(" or ").rstrip(" ,:")
        warnings.warn(f"paceline: gloo instead of shared memory: {cause}", stacklevel=2)
    except BaseException:
        network.close()
        raise
    failures = torch.tensor([int(quicker is None)])
    network.all_reduce(failures, "control").wait()
    if quicker is None or failures:
        if quicker is not None:
            quicker.close()
        return network
    network.close()
    return quicker


def address_for(seats: Sequence[HostInfo]) -> str:
    """Where the others reach this process: loopback suffices inside a host.

    Across hosts, gloo's own rule: the interface that GLOO_SOCKET_IFNAME names, or what this host's
    name stands for.
    """
    if are_on_one_host(seats):
        return LOOPBACK
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    for each in psutil.net_if_addrs().get(interface, []):
        if each.family == socket.AF_INET:
            return each.address
    return socket.gethostname()


def are_on_one_host(seats: Sequence[HostInfo]) -> bool:
    return len({seat.host for seat in seats}) == 1


def have_spare_cores(seats: Sequence[HostInfo]) -> bool:
    """Whether cores of the one host would idle while all members exchange something in a call."""
    return min(seat.cores for seat in seats) > len(seats)


KIND = "control"
"""What traffic is counted as: a backend does not know what its tensors are for."""

LARGE_BYTES = 512 * 1024
"""Smaller sums take less time than handing them to a thread."""

PARTING_SECONDS = 2.0
"""How long one who leaves waits for the others to be ready as well."""

PARTING_POLL_SECONDS = 0.001


class PacelineProcessGroup(dist.ProcessGroup):
    """Made by torch.distributed's `init_process_group` and `new_group`.

    Methods have the names that torch.distributed and its C++ parts call, and match the arguments
    that those give. One thread uses a group at a time.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        # Only this form makes an object whose methods C++ finds; torch's types do not know it.
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        seats = exchange_seats(store, rank, world_size)
        address = address_for(seats)
        self._gloo = Gloo(store, rank, world_size, address, timeout)
        self._gloo.serve(self)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._communicator = connect(store, rank, seats, address, timeout)
        self._background: CommunicationThread | None = None
        self._has_spare_cores = False
        if are_on_one_host(seats):
            self._has_spare_cores = have_spare_cores(seats)
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
            case [whole, tensor, *_] if self._is_whole(whole, tensor) and whole.is_contiguous():
                work = self._gather(tensor, whole.detach().view(-1), [])
                return CommunicatorWork(work, [whole])
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
            case [tensor, whole, ReduceScatterOptions() as options] if _can_reduce(
                options, tensor
            ) and self._is_whole(whole, tensor):
                flat = whole.detach().clone(memory_format=torch.contiguous_format).view(-1)
                return CommunicatorWork(self._scatter(flat, tensor, options), [tensor])
        return self._gloo.start("_reduce_scatter_base", *call, **named)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, *_: Any, **__: Any) -> dist.Work:
        return CommunicatorWork(self._communicator.barrier(), [])

    # PyTorch holds the interpreter lock while it runs an operation that is not overridden here, and
    # a thread of gloo's that frees a tensor needs that lock: each would wait for the other. Gloo's
    # own bindings release it, so every operation that C++ looks up in Python is overridden.

    def allreduce_coalesced(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("allreduce_coalesced", *call, **named)

    def allgather_coalesced(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("allgather_coalesced", *call, **named)

    def allgather_into_tensor_coalesced(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("allgather_into_tensor_coalesced", *call, **named)

    def reduce_scatter_tensor_coalesced(self, *call: Any, **named: Any) -> dist.Work:
        return self._gloo.start("reduce_scatter_tensor_coalesced", *call, **named)

    # Their names since torch 2.13.
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
        """What `destroy_process_group` calls; the others may be at work still, or gone."""
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
        """Until all are about to leave, within a limit."""
        parting = self._communicator.barrier()
        deadline = monotonic() + PARTING_SECONDS
        while not parting.is_completed() and monotonic() < deadline:
            sleep(PARTING_POLL_SECONDS)

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
                lambda fork: self._averaged(fork.all_reduce(tensor, KIND), tensor, options).wait(),
                [tensor],
            )
        work = self._communicator.all_reduce(tensor, KIND)
        return CommunicatorWork(self._averaged(work, tensor, options), [tensor])

    def _gather(self, tensor: Tensor, flat: Tensor, parts: Sequence[Tensor]) -> Work:
        """Fill a flat tensor with everybody's; then copy it to the parts, one a rank."""
        chunk(flat, self.size(), self.rank()).copy_(tensor.detach().reshape(-1))

        def deal_out() -> None:
            for rank, part in enumerate(parts):
                _copy(chunk(flat, self.size(), rank), part)

        return self._communicator.all_gather(flat, KIND).on_success(deal_out)

    def _scatter(self, flat: Tensor, tensor: Tensor, options: Any) -> Work:
        """Sum a flat tensor over the ranks, and copy this one's chunk to its tensor."""
        own = chunk(flat, self.size(), self.rank())
        work = self._communicator.reduce_scatter(flat, KIND)
        work.on_success(lambda: _copy(own, tensor))
        return self._averaged(work, tensor, options)

    def _averaged(self, work: Work, tensor: Tensor, options: Any) -> Work:
        if options.reduceOp == ReduceOp.AVG:
            work.on_success(lambda: _divide(tensor, self.size()))
        return work

    def _are_even(self, parts: Sequence[Tensor], tensor: Tensor) -> bool:
        """Whether there is a part for every rank, all of one kind and size."""
        return (
            len(parts) == self.size()
            and _are_plain(tensor, *parts)
            and all(part.numel() == tensor.numel() for part in parts)
        )

    def _is_whole(self, whole: Tensor, tensor: Tensor) -> bool:
        """Whether one is as large as all ranks' of the other."""
        return _are_plain(whole, tensor) and whole.numel() == tensor.numel() * self.size()


def _are_plain(*tensors: Tensor) -> bool:
    """Whether they are in main memory, dense, and of one dtype."""
    return all(
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype == tensors[0].dtype
        for tensor in tensors
    )


def _can_reduce(options: Any, tensor: Tensor) -> bool:
    """Whether communicators can do that: sums of anything, and means of what can be divided."""
    is_sum = bool(options.reduceOp == ReduceOp.SUM)
    is_mean = options.reduceOp == ReduceOp.AVG and tensor.is_floating_point()
    return (is_sum or is_mean) and _are_plain(tensor)


def _copy(source: Tensor, into: Tensor) -> None:
    into.detach().copy_(source.view(into.shape))


def _divide(tensor: Tensor, by: int) -> None:
    tensor.detach().div_(by)
