"""Operations under way, as torch.distributed wants to see them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.work import Work

Future = torch.futures.Future[Any]


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
