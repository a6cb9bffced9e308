"""Create and abort gloo and NCCL process groups, translate errors, select network interfaces.

The groups are created directly from a store and an address.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports neither

from paceline.comm.communicator import OperationContext
from paceline.errors import PeerError

SUMMABLE_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)
"""Dtypes that both gloo and NCCL can sum."""

PRIORITY_BOOST = 10
"""Difference between the nice values of the caller and of threads that send."""
POLLING_NICENESS = 10
"""What polling threads of other addresses than loopback add to the nice value of the caller."""

TASKS = Path("/proc/self/task")
POLLING_THREAD = "gloo_tcp_loop"

ABORT_TAG = 1
"""Tag of receives that match no message; all messages have tag 0."""

NCCL_WATCHDOG_SECONDS = 60.0
"""Extra time after an operation times out before NCCL's watchdog aborts the process."""

INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Environment variables that select the network interface; NCCL treats a bare name as a prefix."""


def create_gloo(
    store: Store, rank: int, world_size: int, address: str, timeout_seconds: float
) -> Any:
    """Create a gloo process group that listens only on `address`."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_seconds)
    options._threads = 2
    with starting_gloo(address):
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, options)


@contextmanager
def starting_gloo(address: str) -> Iterator[None]:
    """Set the priority of threads that gloo starts in this block, and the policy of polling ones.

    A message wakes the polling thread of its receiver. If that preempts a thread that holds the
    lock of a connection, other polling threads use up their time slices until the lock is released.
    So polling threads wait for a core instead of preempting other threads. Except on loopback, they
    also have a lower priority than threads that send or compute, which helps nodes that share
    cores. Idle priority would let computation stop communication.
    """
    others = _threads()
    with communication_priority(address):
        yield
    # Only Linux has this policy, which needs no permission.
    policy = getattr(os, "SCHED_BATCH", None)
    if policy is None:
        return
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if not is_loopback(address):
        niceness += POLLING_NICENESS
    for polling in _polling_threads(sorted(_threads() - others)):
        with suppress(OSError):  # the thread has ended, or has a lower priority already
            if os.sched_getscheduler(polling) == os.SCHED_OTHER:
                os.sched_setscheduler(polling, policy, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, polling, niceness)


def _polling_threads(started: Sequence[int]) -> Sequence[int]:
    """Of threads that were started, in their order, those in which gloo polls: one per device."""
    names = {}
    for thread in started:
        with suppress(OSError):  # it has ended
            names[thread] = (TASKS / str(thread) / "comm").read_text().strip()
    named = [thread for thread, name in names.items() if name == POLLING_THREAD]
    # Gloo starts them first, and only new versions of gloo give them a name.
    return named or [*names][:1]


def _threads() -> set[int]:
    """Ids of the threads of this process; empty where /proc does not list them."""
    return {int(task.name) for task in TASKS.iterdir()} if TASKS.is_dir() else set()


def communication_priority(address: str) -> AbstractContextManager[None]:
    """Priority of threads that use the connections of `address`.

    Gloo's threads are started with it, and other threads need it while they start a message: a
    thread of higher priority would keep one that has the lock of a connection from releasing it.
    """
    # Loopback has no link to keep busy, so a higher priority would only interrupt computation.
    return nullcontext() if is_loopback(address) else high_priority()


@contextmanager
def high_priority() -> Iterator[None]:
    """Raise the priority of this thread and of threads it starts, including those of C++ code.

    Communication threads do little work, but the link is idle until they run. This has no effect
    without permission to raise priorities, which root has.
    """
    # On Linux, priority is per thread, and new threads inherit it.
    previous = os.getpriority(os.PRIO_PROCESS, 0)
    is_raised = False
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, previous - PRIORITY_BOOST)
        is_raised = True
    try:
        yield
    finally:
        if is_raised:
            os.setpriority(os.PRIO_PROCESS, 0, previous)


def abort_gloo(gloo: Any, peers: Iterable[int]) -> None:
    """Close gloo's connections, so that operations in progress fail here and on the peers.

    Gloo has no abort, and its destructor waits for operations in progress. A receive that times
    out, however, closes its connection.
    """
    for peer in peers:
        with suppress(RuntimeError):
            gloo.recv([torch.empty(1)], peer, ABORT_TAG).wait(timedelta(milliseconds=1))


def create_nccl(
    store: Store,
    rank: int,
    world_size: int,
    address: str,
    gpu: torch.device,
    timeout_seconds: float,
) -> Any:
    """Create an NCCL process group on the network interface of `address`. Collective.

    The NCCL communicator is created here, where every rank takes part. With lazy initialization,
    only the ranks that send would create it, and they would wait without a timeout for the other
    ranks.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_seconds + NCCL_WATCHDOG_SECONDS)
    with use_interface_of(address):
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, world_size, options)
        nccl.eager_connect_single_device(gpu)
    return nccl


def start_nccl_messages(
    nccl: Any,
    *,
    send: tuple[torch.Tensor, int] | None = None,
    recv: tuple[torch.Tensor, int] | None = None,
) -> Any:
    """Start a send, a receive, or both; each is a tensor and its peer.

    Messages are always grouped, even a single one: torch runs groups on the communicator of all
    ranks and single messages on a communicator of two ranks, and the two never match. Outside a
    group, NCCL also runs messages sequentially, so two ranks that both send first would deadlock.
    """
    nccl._start_coalescing()
    try:
        if recv is not None:
            nccl.recv([recv[0]], recv[1], 0)
        if send is not None:
            nccl.send([send[0]], send[1], 0)
    except BaseException:
        # Raise the first error; ending the group may fail because of it.
        with suppress(Exception):
            nccl._end_coalescing()
        raise
    return nccl._end_coalescing()


class PeerErrorTranslator:
    """Context manager that translates a process group error into a one-line `PeerError`."""

    __slots__ = ("_context", "_timeout_seconds")

    def __init__(self, context: OperationContext, timeout_seconds: float) -> None:
        self._context, self._timeout_seconds = context, timeout_seconds

    def __enter__(self) -> None:
        return

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, RuntimeError):
            raise self._translate(error) from None

    def _translate(self, error: RuntimeError) -> PeerError:
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            return self._context.timed_out(self._timeout_seconds)
        if "closed" in text or "reset" in text or "broken pipe" in text:
            return self._context.failed("the connection was closed")
        return self._context.failed(str(error).splitlines()[0])


@contextmanager
def use_interface_of(address: str) -> Iterator[None]:
    """Make torch's default group and NCCL listen on the network interface with this address.

    They read the interface only from environment variables. Values that the user has set are kept.
    """
    interface = interface_of(address)
    added = {
        variable: template.format(interface)
        for variable, template in INTERFACE_VARIABLES.items()
        if interface is not None and variable not in os.environ
    }
    os.environ.update(added)
    try:
        yield
    finally:
        for variable in added:
            del os.environ[variable]


def interface_of(address: str) -> str | None:
    """Return the network interface with this address, such as `lo` for any 127.x.y.z."""
    loopback = is_loopback(address)
    for interface, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.address == address or (loopback and is_loopback(each.address)):
                return interface
    return None


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
