"""Adapters to torch.distributed: Work handles, and the gloo group for all other operations.

Errors about lost peers are one-line PeerErrors, for gloo as well as for communicators.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports neither

from paceline.comm.background import CommunicationThread
from paceline.comm.buffers import StagingBuffer
from paceline.comm.communicator import Communicator, OperationContext
from paceline.comm.process_groups import PeerErrorTranslator, create_gloo
from paceline.comm.work import Work

Future = torch.futures.Future[Any]

CONNECTIONS = "gloo/transport"
"""Appears in gloo errors about lost peers; other errors are mistakes of the caller."""

PREPOSITIONS = {"send": "to", "recv": "from"}

_ABANDONED: list[Any] = []


def wait_in_backward(work: dist.Work) -> None:
    """Wait for `work` at the end of the backward pass, if called during one.

    DistributedDataParallel also waits there, in C++, where an error becomes a multi-line message.
    This wait comes first and raises the original error.
    """
    if torch._C._current_graph_task_id() != -1:
        Variable._execution_engine.queue_callback(work.synchronize)


class CommunicatorWork(dist.Work):
    """An operation of a communicator, completed by `wait` or `get_future`.

    No thread could complete a future later, and its owner waits for it without calling this object.
    `get_future` therefore waits and returns a completed future.
    """

    def __init__(self, work: Work, tensors: list[Tensor]) -> None:
        super().__init__()
        self._work = work
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for completion; `timeout` is ignored in favor of the timeout of the group."""
        self._work.wait()
        return True

    def synchronize(self) -> None:
        self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of a completed operation, if it failed."""
        if self._work.is_completed():
            try:
                self._work.wait()
            except Exception as error:  # noqa: BLE001 - returned to the caller
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
    """An operation on a communication thread, which also completes its future."""

    def __init__(
        self,
        background: CommunicationThread,
        operation: Callable[[Communicator], None],
        tensors: list[Tensor],
    ) -> None:
        outcome = _Outcome()
        work = background.submit(lambda duplicate: outcome.record(operation, duplicate))
        super().__init__(work, tensors)
        self._outcome = outcome

    def get_future(self) -> Future:
        ended: Future = torch.futures.Future()
        result = ended.then(self._result_or_error)
        self._work.add_done_callback(lambda _: ended.set_result(None))
        wait_in_backward(self)
        return result

    def _result_or_error(self, _: object) -> list[Tensor]:
        if self._outcome.error is not None:
            raise RuntimeError(self._outcome.error)
        return self._tensors


class _Outcome:
    """Error of an operation on its thread, for callers other than the one that waits."""

    error: str | None = "not executed because an earlier operation failed"

    def record(self, operation: Callable[[Communicator], None], communicator: Communicator) -> None:
        try:
            operation(communicator)
        except Exception as error:
            self.error = str(error)
            raise
        self.error = None


class Gloo:
    """A gloo group; `start` runs the operations of `backend` by name."""

    def __init__(
        self, store: Store, rank: int, world_size: int, address: str, timeout: timedelta
    ) -> None:
        self._rank = rank
        self._peers = tuple(each for each in range(world_size) if each != rank)
        self._timeout_seconds = timeout.total_seconds()
        self.has_lost_peers = False
        self.backend: Any = create_gloo(
            PrefixStore("rest", store), rank, world_size, address, self._timeout_seconds
        )
        # Some operations have Python bindings only in ProcessGroup.
        self._group: Any = dist.ProcessGroup(store, rank, world_size)
        self.serve(self._group)

    def serve(self, group: dist.ProcessGroup) -> None:
        """Handle the operations that C++ requests from a group, for tensors on any device."""
        for device in ("cpu", "cuda"):
            group._register_backend(
                torch.device(device), dist.ProcessGroup.BackendType.GLOO, self.backend
            )

    def start(self, name: str, *call: Any, **named: Any) -> GlooWork:
        """Start an operation by its name in the gloo bindings."""
        peers = (call[1],) if name in PREPOSITIONS else self._peers
        description = f"{name.strip('_')} {PREPOSITIONS.get(name, 'with')}"
        context = OperationContext(self._rank, description, peers)
        with self.errors(context):
            handle = self._function(name)(*call, **named)
        return GlooWork(self, context, handle)

    def _function(self, name: str) -> Callable[..., Any]:
        owner = self.backend if hasattr(self.backend, name) else self._group
        function: Callable[..., Any] = getattr(owner, name)
        return function

    def all_reduce(self, tensor: Tensor, options: Any) -> GlooWork:
        """All-reduce a tensor with any strides, which gloo alone handles incorrectly."""
        staged = StagingBuffer.from_tensor(tensor)
        work = self.start("allreduce", [staged.flat], options)
        if staged.is_copy:
            work.wait()
            staged.copy_back()
        return work

    def abandon(self) -> None:
        """Keep the group alive until the process exits, because operations may still be failing.

        Freeing it waits for its threads while holding the GIL, and a thread may need the GIL to
        free a tensor.
        """
        _ABANDONED.append(self.backend)

    def errors(self, context: OperationContext) -> PeerErrorTranslator:
        """Return a context manager that turns an error about a lost peer into a PeerError."""
        return _LostPeerErrorTranslator(self, context, self._timeout_seconds)


class _LostPeerErrorTranslator(PeerErrorTranslator):
    __slots__ = ("_gloo",)

    def __init__(self, gloo: Gloo, context: OperationContext, timeout_seconds: float) -> None:
        super().__init__(context, timeout_seconds)
        self._gloo = gloo

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and CONNECTIONS in str(error):
            self._gloo.has_lost_peers = True
            super().__exit__(_type, error, _traceback)


class GlooWork(dist.Work):
    """An operation of gloo."""

    def __init__(self, gloo: Gloo, context: OperationContext, handle: Any) -> None:
        super().__init__()
        self._gloo, self._context, self._handle = gloo, context, handle

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._gloo.errors(self._context):
            return bool(self._handle.wait(timeout))

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
