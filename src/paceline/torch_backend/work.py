"""Operations under way, as torch.distributed wants to see them.

Gloo, for what communicators have no operation for; a lost peer is one clear line here too."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch lists neither

from paceline.comm.background import CommunicationThread
from paceline.comm.buffers import StagingBuffer
from paceline.comm.communicator import Communicator, OperationContext
from paceline.comm.process_groups import create_gloo, to_peer_error
from paceline.comm.work import Work

Future = torch.futures.Future[Any]


def wait_in_backward(work: dist.Work) -> None:
    """Wait at the end of the backward pass, if this is one.

    DistributedDataParallel waits there too, for the future and in C++, where an error would become
    many lines; this comes before and raises it as it is.
    """
    if torch._C._current_graph_task_id() != -1:
        Variable._execution_engine.queue_callback(work.synchronize)


class CommunicatorWork(dist.Work):
    """An operation of a communicator's, completed by `wait` or by asking for its future.

    No thread would complete a future later, and who has one waits for it without calling anything
    here: so `get_future` waits, and returns one that is complete.
    """

    def __init__(self, work: Work, tensors: list[Tensor]) -> None:
        super().__init__()
        self._work = work
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The time limit is the group's; no other is heeded."""
        self._work.wait()
        return True

    def synchronize(self) -> None:
        self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Why a completed operation failed."""
        if self._work.is_completed():
            try:
                self._work.wait()
            except Exception as error:  # noqa: BLE001 - it is the answer
                return error
        return None

    def result(self) -> list[Tensor]:
        self._work.wait()
        return self._tensors

    def get_future(self) -> Future:
        self._work.wait()
        future: Future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class BackgroundWork(CommunicatorWork):
    """An operation that a thread carries out, and whose future it completes."""

    def __init__(
        self,
        background: CommunicationThread,
        operation: Callable[[Communicator], None],
        tensors: list[Tensor],
    ) -> None:
        ending = _Ending()
        super().__init__(background.submit(lambda fork: ending.follow(operation, fork)), tensors)
        self._ending = ending

    def get_future(self) -> Future:
        ended: Future = torch.futures.Future()
        result = ended.then(self._outcome)
        self._work.add_done_callback(lambda _: ended.set_result(None))
        wait_in_backward(self)
        return result

    def _outcome(self, _: object) -> list[Tensor]:
        if self._ending.error is not None:
            raise RuntimeError(self._ending.error)
        return self._tensors


class _Ending:
    """How an operation ended on its thread, for others than the one who waits for it."""

    error: str | None = "not carried out, since one before it failed"

    def follow(self, operation: Callable[[Communicator], None], communicator: Communicator) -> None:
        try:
            operation(communicator)
        except Exception as error:
            self.error = str(error)
            raise
        self.error = None


T = TypeVar("T")

CONNECTIONS = "gloo/transport"
"""Where gloo's errors say they come from if a peer is lost; others tell what a caller did wrong."""

PREPOSITIONS = {"send": "to", "recv": "from"}


_ABANDONED: list[Any] = []


class Gloo:
    """A gloo group. The operations are those of `backend`, by name."""

    def __init__(
        self, store: Store, rank: int, world_size: int, address: str, timeout: timedelta
    ) -> None:
        self._rank = rank
        self._peers = tuple(each for each in range(world_size) if each != rank)
        self._seconds = timeout.total_seconds()
        self.has_lost_peers = False
        self.backend: Any = create_gloo(
            PrefixStore("rest", store), rank, world_size, address, self._seconds
        )
        # Some operations have a binding only here.
        self._group: Any = dist.ProcessGroup(store, rank, world_size)
        self.serve(self._group)

    def serve(self, group: dist.ProcessGroup) -> None:
        """Carry out what C++ asks a group for, whichever device the tensors are on."""
        for device in ("cpu", "cuda"):
            group._register_backend(
                torch.device(device), dist.ProcessGroup.BackendType.GLOO, self.backend
            )

    def start(self, name: str, *call: Any, **named: Any) -> GlooWork:
        peers = (call[1],) if name in PREPOSITIONS else self._peers
        words = f"{name.strip('_')} {PREPOSITIONS.get(name, 'with')}"
        operation = OperationContext(self._rank, words, peers)
        handle = self.attempt(operation, lambda: self._function(name)(*call, **named))
        return GlooWork(self, operation, handle)

    def _function(self, name: str) -> Callable[..., Any]:
        owner = self.backend if hasattr(self.backend, name) else self._group
        function: Callable[..., Any] = getattr(owner, name)
        return function

    def all_reduce(self, tensor: Tensor, options: Any) -> GlooWork:
        """Of a tensor with any strides, which gloo's own would get wrong."""
        staged = StagingBuffer.of(tensor)
        work = self.start("allreduce", [staged.flat], options)
        if staged.is_copy:
            work.wait()
            staged.copy_back()
        return work

    def abandon(self) -> None:
        """Keep the group until the process ends, where operations may still be failing.

        Whoever frees it waits for its threads, and holds Python's lock; and a thread may need the
        lock to give up a tensor.
        """
        _ABANDONED.append(self.backend)

    def attempt(self, operation: OperationContext, action: Callable[[], T]) -> T:
        try:
            return action()
        except RuntimeError as error:
            if CONNECTIONS not in str(error):
                raise
            self.has_lost_peers = True
            raise to_peer_error(operation, self._seconds, error) from None


class GlooWork(dist.Work):
    """An operation of gloo's."""

    def __init__(self, gloo: Gloo, operation: OperationContext, handle: Any) -> None:
        super().__init__()
        self._gloo, self._operation, self._handle = gloo, operation, handle

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return bool(self._gloo.attempt(self._operation, lambda: self._handle.wait(timeout)))

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._handle.is_completed())

    def is_success(self) -> bool:
        return bool(self._handle.is_success())

    def exception(self) -> Any:
        return self._handle.exception()

    def result(self) -> list[Tensor]:
        self.wait()
        result: list[Tensor] = self._handle.result()
        return result

    def get_future(self) -> Future:
        future: Future = self._handle.get_future()
        wait_in_backward(self)
        return future

    def source_rank(self) -> int:
        return int(self._handle._source_rank())

    _source_rank = source_rank
