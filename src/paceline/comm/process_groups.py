"""torch.distributed's backends, gloo and NCCL, as far as paceline needs them.

Both are made straight from a store and an address; an operation's handle becomes a `Work`.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from threading import Thread
from time import monotonic, sleep
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch lists neither

from paceline.comm.communicator import OperationContext
from paceline.comm.work import Work
from paceline.errors import PeerError
from paceline.measure.timeline import Moment, Timeline

T = TypeVar("T")

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

NCCL_POLL_SECONDS = 0.0001
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


def attempt(operation: OperationContext, seconds: float, action: Callable[[], T]) -> T:
    """Do it; what the backend raises becomes one line about the operation and its peers."""
    try:
        return action()
    except RuntimeError as error:
        raise to_peer_error(operation, seconds, error) from None


def to_peer_error(operation: OperationContext, seconds: float, error: RuntimeError) -> PeerError:
    """That line, for what a backend raised."""
    text = str(error).lower()
    if "timed out" in text or "timeout" in text:
        return operation.timed_out(seconds)
    if "closed" in text or "reset" in text or "broken pipe" in text:
        return operation.failed("the connection was closed")
    return operation.failed(str(error).splitlines()[0])


class BackendWork(Work):
    """A backend's handle of an operation under way."""

    def __init__(self, handle: Any, operation: OperationContext, seconds: float) -> None:
        super().__init__()
        self._handle, self._operation, self._seconds = handle, operation, seconds

    def _block(self) -> None:
        attempt(self._operation, self._seconds, self._finish)

    @abstractmethod
    def _finish(self) -> None: ...


class GlooWork(BackendWork):
    """A collective of gloo's."""

    def add_done_callback(self, action: Callable[[float], None]) -> None:
        is_first = not self._on_completion
        super().add_done_callback(action)
        if is_first:
            self._handle.get_future().then(lambda _: self._complete())

    def _finish(self) -> None:
        self._handle.wait()

    def _poll(self) -> bool:
        return bool(self._handle.is_completed())


class GlooPointToPointWork(BackendWork):
    """A send or receive of gloo's, which says whether it is complete only to those who wait for it.

    So the first who asks whether it is done starts a thread that waits.
    """

    _waiter: Thread | None = None
    _failure: RuntimeError | None = None

    def _finish(self) -> None:
        if self._waiter is None:
            self._handle.wait()
            return
        self._waiter.join()
        if self._failure is not None:
            raise self._failure

    def _poll(self) -> bool:
        if self._waiter is None:
            self._waiter = Thread(target=self._wait, name="paceline-poll", daemon=True)
            self._waiter.start()
        return not self._waiter.is_alive()

    def _wait(self) -> None:
        try:
            self._handle.wait()
        except RuntimeError as error:
            self._failure = error


class NcclWork(BackendWork):
    """An operation of NCCL's, whose own `wait` only puts later work on the GPU behind it."""

    _end: Moment | None = None

    def __init__(
        self,
        handle: Any,
        operation: OperationContext,
        seconds: float,
        timeline: Timeline | None = None,
    ) -> None:
        """`timeline`: of the GPU, for a collective; torch has no future for messages."""
        super().__init__(handle, operation, seconds)
        self._timeline = timeline

    def add_done_callback(self, action: Callable[[float], None]) -> None:
        is_first = not self._on_completion
        super().add_done_callback(action)
        if is_first and self._timeline is not None:
            # Called at once, with a current stream that continues when the collective has ended.
            self._handle.get_future().then(self._mark_end)

    def _mark_end(self, _: object) -> None:
        assert self._timeline is not None
        self._end = self._timeline.mark()

    def _finish(self) -> None:
        deadline = monotonic() + self._seconds
        while not self._handle.is_completed():
            if monotonic() > deadline:
                raise self._operation.timed_out(self._seconds)
            sleep(NCCL_POLL_SECONDS)
        self._handle.wait()
        if self._end is not None and self._timeline is not None:
            self._complete(self._timeline.seconds(self._end))

    def _poll(self) -> bool:
        return bool(self._handle.is_completed())


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
