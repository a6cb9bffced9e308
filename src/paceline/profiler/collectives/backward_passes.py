"""The end of backward passes, where DDP waits in C++ for the buckets that it issued."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch.autograd import Variable
from torch.distributed import Work

from paceline.profiler.collectives.ddp import DdpModels
from paceline.profiler.collectives.log import EXPOSED, POLLED

if TYPE_CHECKING:
    from paceline.profiler.collectives.recorder import CollectiveRecorder

MAX_PASSES = 8
"""A pass that raises an exception never ends."""

unbox: Callable[[Any], Any] = Work.unbox
queue_callback = Variable._execution_engine.queue_callback

COPIES_KEPT = 9
"""Passes from which the time that DDP takes after its last bucket is estimated."""


class _Pass:
    """A backward pass that issued collectives."""

    __slots__ = (
        "collectives",
        "computed",
        "is_exact",
        "is_on_gpu",
        "issued",
        "phase",
        "remaining",
    )

    def __init__(self, *, is_exact: bool) -> None:
        self.collectives: list[tuple[int, Any, int]] = []
        """Positions in the log, Works, which are not unboxed, and their keys in `pending`, or 0."""
        self.remaining: list[tuple[int, Any]] = []
        """Positions and futures of those that DDP waits for: a Work is completed only after its
        future."""
        self.is_exact = is_exact
        self.is_on_gpu = False
        self.phase = ""
        """On a GPU: the phase after it."""
        self.issued = self.computed = 0.0
        """When the last collective was issued, and all gradients were computed."""


class BackwardPasses:
    """Blocked time is from the call that issues the last bucket to the end of that bucket.

    The autograd engine runs callbacks in the order in which they are queued, after all gradients
    are computed. DDP queues its own with its last bucket. The first bucket of a pass queues
    `_computed`, which queues `_synchronized`: one runs before DDP waits, and the other one after.

    After the last bucket, DDP copies gradients. How long is known from passes whose ends are noted
    by callbacks of the futures. In the others, that is subtracted from the end of the pass.
    """

    def __init__(self, recorder: CollectiveRecorder, models: DdpModels) -> None:
        self._recorder = recorder
        self._models = models
        self._passes: dict[int, _Pass] = {}
        self._copies: deque[float] = deque(maxlen=COPIES_KEPT)
        self._copy_seconds = 0.0
        self._computed = recorder.guard(self._computed_)
        self._synchronized = recorder.guard(self._synchronized_)

    def add(self, task: int, position: int, work: Any, key: int = 0) -> None:
        """Add a collective that was issued just now.

        `work` is not unboxed; `key`: its id in `pending`, if the program may wait for it itself.
        """
        known = self._passes.get(task) or self._begin(task)
        known.collectives.append((position, work, key))
        if known.is_exact:
            self._recorder.note_end(unbox(work), position)
        known.issued = perf_counter()

    def add_on_gpu(self, task: int) -> None:
        """A collective was issued on a GPU."""
        known = self._passes.get(task) or self._begin(task)
        known.is_on_gpu = True

    def _begin(self, task: int) -> _Pass:
        if len(self._passes) >= MAX_PASSES:
            self._passes.clear()
        known = self._passes[task] = _Pass(is_exact=self._recorder.is_exact_due(perf_counter()))
        queue_callback(partial(self._computed, task))
        return known

    def _computed_(self, task: int) -> None:
        known = self._passes.get(task)
        if known is None:
            return
        known.computed = perf_counter()
        if known.is_on_gpu:
            # The phase ends when the GPU has done what DDP makes it wait for.
            clock = self._recorder.blocked.program.clock
            known.phase = clock.phase
            clock.enter("exchange")
        else:
            for position, work, _ in known.collectives:
                future = unbox(work).get_future()
                if future.done():
                    self._recorder.has_ended(position, known.computed)
                else:
                    known.remaining.append((position, future))
        queue_callback(partial(self._synchronized, task))
        self._recorder.blocked.program.recorder_seconds += perf_counter() - known.computed

    def _synchronized_(self, task: int) -> None:
        now = perf_counter()
        known, log = self._passes.pop(task, None), self._recorder.log
        if known is None or log is None:
            return
        program = self._recorder.blocked.program
        self._models.end_backward(log)
        if known.is_on_gpu:
            program.clock.enter(known.phase)
            return
        # The gradients of the last collective were the last ones, so its call is not computation:
        # threads of the process group may take the core meanwhile.
        last_position = known.collectives[-1][0]
        began = known.computed - (known.issued - log.arrival(last_position))
        copied = max(known.computed, now - self._copy_seconds)
        noted = last = 0.0
        for position, future in known.remaining:
            ended = log.ended(position)
            if ended:
                noted = max(noted, ended)
            elif future.done():
                ended = copied
                log.end(position, ended)
                if position != known.remaining[-1][0]:
                    log.set_flag(position, POLLED)
            # The program waited for the others itself, or did not wait.
            if ended > known.computed and not log.has_flag(position, EXPOSED):
                log.block(position, began, ended)
                last = max(last, ended)
        for position, _, key in known.collectives:
            if key and log.ended(position):
                self._recorder.pending.pop(key, None)
        if known.is_exact and last == noted > 0:
            self._copies.append(now - last)
            self._copy_seconds = median(self._copies)
        if not last and not log.has_flag(last_position, EXPOSED):
            log.block(last_position, began, known.computed)
            last = known.computed
        if last:
            program.expose(began, last)
        program.recorder_seconds += perf_counter() - now
