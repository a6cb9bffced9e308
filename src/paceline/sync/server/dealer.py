"""Who computes what next, where workers are not in step: the parts of the batches, dealt in order.

Each global batch has as many parts as there are workers. Whoever is free claims the next part, so a
fast worker does more of them than a slow one, and each sample is still used exactly once an epoch.

Bounded staleness: a part of batch i is dealt only when no worker is still busy with a batch before
i - staleness. So whoever computes batch i has seen every update of all batches before i -
staleness, which is the promise of the stale synchronous parallel model (Ho and others, "More
Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013), while work still
goes to those who are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Condition
from time import perf_counter

from paceline.errors import PeerError
from paceline.sync.strategy import Terms, Turn


@dataclass(frozen=True, slots=True)
class Deal:
    turn: Turn
    ahead: int
    """Iterations between this turn and that of the slowest worker."""
    waited_seconds: float


class Dealer:
    """Serves all workers, each from a thread of its own."""

    def __init__(self, workers: int, staleness: int | None) -> None:
        """`staleness` None: nobody ever waits for a slower one."""
        self._workers = workers
        self._staleness = staleness
        self._changed = Condition()
        self._next = 0
        """Number of the next part, counted from the run's first batch on."""
        self._busy: dict[int, int] = {}
        """Which part each worker computes."""
        self._stopping = self._ended = self._gave_up = False

    def claim(self, worker: int, terms: Terms) -> Deal:
        """The worker's next turn, once it may begin; what it had claimed before counts as done."""
        began = perf_counter()
        with self._changed:
            self._next = max(self._next, terms.first * self._workers)
            self._stopping |= terms.stop
            self._busy.pop(worker, None)
            self._changed.notify_all()
            while (turn := self._decide(terms)) is None:
                self._changed.wait()
            ahead = turn.iteration - self._slowest()
            if turn.call in ("train", "meet"):
                self._busy[worker] = self._next
                self._next += 1
        return Deal(turn, max(0, ahead), perf_counter() - began)

    def done(self, worker: int) -> None:
        with self._changed:
            self._busy.pop(worker, None)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def give_up(self) -> None:
        """Let nobody wait any longer: somebody who would have to come is gone."""
        with self._changed:
            self._gave_up = True
            self._changed.notify_all()

    def _slowest(self) -> int:
        """The earliest batch that somebody is busy with."""
        return min(self._busy.values(), default=self._next) // self._workers

    def _decide(self, terms: Terms) -> Turn | None:
        """None: not yet."""
        if self._gave_up:
            raise PeerError("a worker is gone")
        batch, part = divmod(self._next, self._workers)
        if self._ended or batch >= terms.total:
            return Turn(batch, part, "end")
        if self._stopping and part == 0:
            return None if self._busy else Turn(batch, part, "stop")
        slowest = self._slowest()
        if terms.meet_every:
            # Of the batch before which all meet everyone gets a part, once all are here.
            meeting = batch // terms.meet_every * terms.meet_every
            if slowest < meeting and meeting > terms.first:
                return None
            if batch == meeting and batch > terms.first:
                return Turn(batch, part, "meet")
        if self._staleness is not None and batch - slowest > self._staleness:
            return None
        return Turn(batch, part)
