"""torch.distributed's backends, gloo and NCCL, as far as paceline needs them.

Both are made straight from a store and an address; an operation's handle becomes a `Work`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch lists neither

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
"""The dtypes that both backends can sum."""

URGENCY = 10
"""By how much the threads of a backend are nearer to the front than those that compute (nice)."""

BREAKING_TAG = 1
"""Of messages that nobody sends; all others have tag 0."""

NCCL_WATCHDOG_SECONDS = 60.0
"""NCCL's own watchdog ends the whole process; it must come after the time limit that says why."""


def create_gloo(
    store: Store, rank: int, world_size: int, address: str, timeout_seconds: float
) -> Any:
    """Gloo, listening on the given address of this machine alone."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_seconds)
    options._threads = 2
    # Within a machine no link stands still, and the computing thread had better not be interrupted.
    with nullcontext() if is_loopback(address) else high_priority_threads():
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, options)


@contextmanager
def high_priority_threads() -> Iterator[None]:
    """Let threads that are started in here, of any language, come before others on a busy core.

    They have little to do, and a link stands still until it is done. Needs the right to raise
    priorities, as root has it; for others nothing changes.
    """
    usual = os.getpriority(os.PRIO_PROCESS, 0)  # on Linux that of this thread; new ones inherit it
    is_raised = False
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, usual - URGENCY)
        is_raised = True
    try:
        yield
    finally:
        if is_raised:
            os.setpriority(os.PRIO_PROCESS, 0, usual)


def abort_gloo(gloo: Any, peers: Iterable[int]) -> None:
    """Cut gloo's connections, so that what is under way on them fails, here and at the peers.

    Gloo offers no such thing, and waits for what is under way before it goes; but a receive that is
    given up cuts the connection that it was on.
    """
    for peer in peers:
        with suppress(RuntimeError):
            gloo.recv([torch.empty(1)], peer, BREAKING_TAG).wait(timedelta(milliseconds=1))


def create_nccl(
    store: Store,
    rank: int,
    world_size: int,
    address: str,
    gpu: torch.device,
    timeout_seconds: float,
) -> Any:
    """NCCL between the GPUs of all ranks, on the network interface of the given address.

    Collective. The NCCL communicator is created here, where every rank takes part: on its first use
    it would be created by the ranks that have something to send, which then wait, without a
    timeout, for those that have nothing.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_seconds + NCCL_WATCHDOG_SECONDS)
    with sockets_on(address):
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, world_size, options)
        nccl.eager_connect_single_device(gpu)
    return nccl


def start_nccl_messages(
    nccl: Any,
    *,
    send: tuple[torch.Tensor, int] | None = None,
    recv: tuple[torch.Tensor, int] | None = None,
) -> Any:
    """Start sending a tensor to one rank and receiving one from another, or one of the two.

    Always in a group, however many messages there are: torch carries out groups on the communicator
    of all ranks and single messages on one of two ranks, and the two never match. Outside a group
    NCCL also runs messages one after the other, so two ranks that both send first never finish.
    """
    nccl._start_coalescing()
    try:
        if recv is not None:
            nccl.recv([recv[0]], recv[1], 0)
        if send is not None:
            nccl.send([send[0]], send[1], 0)
    except BaseException:
        # What went wrong first is the cause; closing the group may fail because of it.
        with suppress(Exception):
            nccl._end_coalescing()
        raise
    return nccl._end_coalescing()


class PeerErrors:
    """Context manager that turns an error of a process group into a one-line `PeerError`."""

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


INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""How each library is told its network interface; to NCCL a bare name is a prefix."""


@contextmanager
def sockets_on(address: str) -> Iterator[None]:
    """Make torch's default group and NCCL listen on the network interface with this address.

    They read it from the environment and offer no other way; a value that the user set is kept.
    """
    interface = interface_of(address)
    added = {
        variable: form.format(interface)
        for variable, form in INTERFACE_VARIABLES.items()
        if interface is not None and variable not in os.environ
    }
    os.environ.update(added)
    try:
        yield
    finally:
        for variable in added:
            del os.environ[variable]


def interface_of(address: str) -> str | None:
    """The network interface with this address, such as `lo`; 127.x.y.z is all one interface."""
    loopback = is_loopback(address)
    for interface, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.address == address or (loopback and is_loopback(each.address)):
                return interface
    return None


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
