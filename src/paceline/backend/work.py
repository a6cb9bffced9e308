"""Operations under way, as torch.distributed wants to see them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from paceline.comm.background import Background
from paceline.comm.communicator import Communicator
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
        return self._work.is_done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Why a completed operation failed."""
        if self._work.is_done():
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
        background: Background,
        operation: Callable[[Communicator], None],
        tensors: list[Tensor],
    ) -> None:
        ending = _Ending()
        super().__init__(background.submit(lambda fork: ending.follow(operation, fork)), tensors)
        self._ending = ending

    def get_future(self) -> Future:
        ended: Future = torch.futures.Future()
        result = ended.then(self._outcome)
        self._work.when_complete(lambda _: ended.set_result(None))
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
