"""How stale the updates of a worker were: for each one when it comes, and in all.

Who computes what next, where workers are not in step: the parts of the batches, dealt in order.

Each global batch has as many parts as there are workers. Whoever is free claims the next part, so a
fast worker does more of them than a slow one, and each sample is still used exactly once an epoch.

Bounded staleness: a part of batch i is dealt only when no worker is still busy with a batch before
i - staleness. So whoever computes batch i has seen every update of all batches before i -
staleness, which is the promise of the stale synchronous parallel model (Ho and others, "More
Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013), while work still
goes to those who are free.

A checkpoint, a stop and the end of the run are collective: every worker must get the same call, or
they would enter different collectives. So these calls wait until all workers have asked for their
next turn, and are decided once for all of them: the end of the run precedes a stop, and a stop
precedes a checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from threading import Condition
from time import perf_counter
from typing import Any

from paceline.errors import PeerError
from paceline.strategies.strategy import Action, Assignment, AssignmentRequest, StepMeter


class StalenessMeter(StepMeter):
    """`ahead`: iterations between an update's batch and the one that the slowest worker was at when
    it was begun. `behind`: updates by others between reading the weights and applying it."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[int]] = {"ahead": Counter(), "behind": Counter()}
        self._news: dict[str, list[int]] = {}

    def note(self, *, iteration: int, part: int, ahead: int, behind: int) -> None:
        values = {"batch": iteration, "part": part, "ahead": ahead, "behind": behind}
        for name, value in values.items():
            self._news.setdefault(name, []).append(value)
            if name in self._counts:
                self._counts[name][value] += 1

    def take(self) -> dict[str, list[int]]:
        values, self._news = self._news, {}
        return values

    def summary(self) -> dict[str, Any]:
        """Return mean, maximum and histogram of each measure."""
        measures = {
            name: {
                "mean": sum(value * count for value, count in counts.items()) / counts.total(),
                "max": max(counts),
                "histogram": {str(value): counts[value] for value in sorted(counts)},
            }
            for name, counts in self._counts.items()
            if counts
        }
        return {"staleness": measures}

    def state_dict(self) -> dict[str, dict[int, int]]:
        return {name: dict(counts) for name, counts in self._counts.items()}

    def load_state_dict(self, state: dict[str, dict[int, int]]) -> None:
        self._counts = {name: Counter(counts) for name, counts in state.items()}


@dataclass(frozen=True, slots=True)
class QueuedAssignment:
    turn: Assignment
    ahead: int
    """Iterations between this turn and that of the slowest worker."""
    waited_seconds: float


class AssignmentQueue:
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
        self._asking: set[int] = set()
        """Workers that wait for the answer to a claim."""
        self._stopping = self._finishing = self._gave_up = False
        self._last_action: Action | None = None
        """How the run ends, once that is decided; every worker gets this call."""

    def next_assignment(self, worker: int, terms: AssignmentRequest) -> QueuedAssignment:
        """The worker's next turn, once it may begin; what it had claimed before counts as done."""
        began = perf_counter()
        with self._changed:
            self._next = max(self._next, terms.first * self._workers)
            self._stopping |= terms.stop
            self._finishing |= terms.finish
            self._busy.pop(worker, None)
            self._asking.add(worker)
            self._changed.notify_all()
            while (turn := self._decide(terms)) is None:
                self._changed.wait()
            self._asking.discard(worker)
            ahead = turn.iteration - self._slowest()
            if turn.action in ("train", "checkpoint"):
                self._busy[worker] = self._next
                self._next += 1
        return QueuedAssignment(turn, max(0, ahead), perf_counter() - began)

    def done(self, worker: int) -> None:
        with self._changed:
            self._busy.pop(worker, None)
            self._changed.notify_all()

    def abort(self) -> None:
        """Let nobody wait any longer: somebody who would have to come is gone."""
        with self._changed:
            self._gave_up = True
            self._changed.notify_all()

    def _slowest(self) -> int:
        """The earliest batch that somebody is busy with."""
        return min(self._busy.values(), default=self._next) // self._workers

    def _decide(self, terms: AssignmentRequest) -> Assignment | None:
        """None: not yet."""
        if self._gave_up:
            raise PeerError("a worker is gone")
        batch, part = divmod(self._next, self._workers)
        is_everyone_here = len(self._asking) == self._workers
        if self._last_action is None and is_everyone_here:
            self._last_action = self._ending(batch, part, terms)
        if self._last_action is not None:
            return Assignment(batch, part, self._last_action)
        if self._ending(batch, part, terms) is not None:
            return None
        if terms.checkpoint_every and batch > terms.first and batch % terms.checkpoint_every == 0:
            # Each worker gets one part of the batch that follows a checkpoint: those who were given
            # theirs first stay in the collective until all others have come to it.
            return Assignment(batch, part, "checkpoint") if part > 0 or is_everyone_here else None
        if self._staleness is not None and batch - self._slowest() > self._staleness:
            return None
        return Assignment(batch, part)

    def _ending(self, batch: int, part: int, terms: AssignmentRequest) -> Action | None:
        """How the run is to end once all workers are here; None where it goes on."""
        if self._finishing or batch >= terms.total:
            return "end"
        # A stop waits for a whole batch, so that a resumed run uses each sample once.
        return "stop" if self._stopping and part == 0 else None
