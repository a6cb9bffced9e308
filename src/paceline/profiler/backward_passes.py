"""The end of backward passes, where DDP waits in C++ for the buckets that it issued."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from paceline.profiler.collective_log import EXPOSED
from paceline.profiler.ddp import DdpModels

if TYPE_CHECKING:
    from paceline.profiler.collectives import CollectiveRecorder

MAX_PASSES = 8
"""A pass that raises an exception never ends."""


class _Pass:
    """A backward pass that issued collectives."""

    __slots__ = ("collectives", "computed", "is_on_gpu", "phase")

    def __init__(self) -> None:
        self.collectives: list[tuple[int, Any]] = []
        """Positions in the log and futures."""
        self.is_on_gpu = False
        self.phase = ""
        self.computed = 0.0
        """When all gradients were computed."""


class BackwardPasses:
    """Blocked time is from the last computed gradient to the end of the last bucket.

    The autograd engine runs callbacks in the order in which they are queued, after all gradients
    are computed. DDP queues its own with its last bucket. The first bucket of a pass queues
    `_computed`, which queues `_synchronized`: one runs before DDP waits, and the other one after.
    """

    def __init__(self, recorder: CollectiveRecorder, models: DdpModels) -> None:
        self._recorder = recorder
        self._models = models
        self._passes: dict[int, _Pass] = {}
        self._computed = recorder.guard(self._computed_)
        self._synchronized = recorder.guard(self._synchronized_)

    def add(self, position: int, future: Any) -> None:
        """Add a collective that was issued just now, if a backward pass issued it.

        On a GPU, `future` is None.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        known = self._passes.get(task)
        if known is None:
            if len(self._passes) >= MAX_PASSES:
                self._passes.clear()
            known = self._passes[task] = _Pass()
            Variable._execution_engine.queue_callback(partial(self._computed, task))
        known.collectives.append((position, future))
        known.is_on_gpu |= future is None

    def _computed_(self, task: int) -> None:
        known = self._passes.get(task)
        if known is None:
            return
        clock = self._recorder.blocked.program.clock
        known.computed, known.phase = perf_counter(), clock.phase
        if known.is_on_gpu:
            # The phase ends when the GPU has done what DDP makes it wait for.
            clock.enter("exchange")
        for position, future in known.collectives:
            if future is None:
                continue
            if future.done():
                self._recorder.has_ended(position, known.computed)
            else:
                # While DDP waits, the callback delays no computation.
                future.add_done_callback(self._recorder.ender(None, position))
        Variable._execution_engine.queue_callback(partial(self._synchronized, task))

    def _synchronized_(self, task: int) -> None:
        known, log = self._passes.pop(task, None), self._recorder.log
        if known is None or log is None:
            return
        clock = self._recorder.blocked.program.clock
        self._models.end_backward(log)
        if known.is_on_gpu:
            clock.enter(known.phase)
            return
        now, last = perf_counter(), 0.0
        for position, future in known.collectives:
            ended = log.ended(position)
            if not ended and future.done():
                # DDP may go on before the callback that notes the end.
                ended = now
                log.end(position, now)
            # The program waited for the others itself, or did not wait.
            if ended > known.computed and not log.has_flag(position, EXPOSED):
                log.block(position, known.computed, ended)
                last = max(last, ended)
        if last:
            if clock.log is not None:
                # A log has a phase only when it has ended.
                clock.enter(clock.phase)
            clock.expose(known.phase, known.computed, last)
            clock.exposed.clear()
