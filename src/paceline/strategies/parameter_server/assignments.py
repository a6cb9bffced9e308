"""Work assignment for asynchronous workers, and the staleness of their updates.

Each global batch has as many parts as there are workers. An idle worker requests the next part.
Fast workers therefore compute more parts than slow ones, and each sample is used exactly once per
epoch.

Bounded staleness: a part of batch i is assigned only if no worker still computes a batch before
i - staleness. A worker that computes batch i has therefore seen all updates of batches before
i - staleness, as in the stale synchronous parallel model (Ho et al., "More Effective Distributed ML
via a Stale Synchronous Parallel Parameter Server", 2013).

Checkpoints, stops and the end of the run are collective: all workers must get the same action, or
they would enter different collectives. The queue therefore waits until all workers request their
next assignment, and then decides once for all workers. The end of the run takes precedence over a
stop, and a stop over a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any

from paceline.strategies.strategy import Action, Assignment, AssignmentRequest, StepMeter


class StalenessMeter(StepMeter):
    """Staleness of each update of a worker.

    `ahead` is the number of iterations between the update's batch and the batch of the slowest
    worker when it was assigned. `behind` is the number of updates by other workers between the pull
    of the weights and the push of the update.
    """

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        """`settle` adds the update of a completed step that is still to be pushed."""
        self._settle = settle
        self._counts: dict[str, Counter[int]] = {"ahead": Counter(), "behind": Counter()}
        self._recent: dict[str, list[int]] = {}

    def settle(self) -> None:
        self._settle()

    def add(self, *, iteration: int, part: int, ahead: int, behind: int) -> None:
        values = {"batch": iteration, "part": part, "ahead": ahead, "behind": behind}
        for name, value in values.items():
            self._recent.setdefault(name, []).append(value)
            if name in self._counts:
                self._counts[name][value] += 1

    def take(self) -> dict[str, list[int]]:
        self._settle()
        values, self._recent = self._recent, {}
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


class AssignmentQueue:
    """Assigns parts of batches in order; requests wait until they can be granted."""

    def __init__(self, workers: int, staleness: int | None) -> None:
        """`staleness` is the bound in iterations; None means no bound."""
        self._workers = workers
        self._staleness = staleness
        self._next = 0
        """Index of the next part, counted from the first batch of the run."""
        self._busy: dict[int, int] = {}
        """The part that each worker computes."""
        self._waiting: dict[int, tuple[AssignmentRequest, float]] = {}
        """Requests of workers that wait for an assignment and their times, in order of arrival."""
        self._stopping = self._finishing = False
        self._last_action: Action | None = None
        """The final action, once it is decided; all workers get it."""

    def request(self, worker: int, request: AssignmentRequest) -> None:
        """Request a worker's next assignment; its previous one counts as done."""
        self._next = max(self._next, request.first * self._workers)
        self._stopping |= request.stop
        self._finishing |= request.finish
        self._busy.pop(worker, None)
        self._waiting[worker] = request, perf_counter()

    def done(self, worker: int) -> None:
        """Count a worker's assignment as done."""
        self._busy.pop(worker, None)

    def grant(self) -> Iterator[tuple[int, Assignment]]:
        """Return the workers whose requests can be granted now, with their assignments."""
        for worker, (request, requested) in list(self._waiting.items()):
            assignment = self._decide(request)
            if assignment is None:
                continue
            del self._waiting[worker]
            ahead = max(0, assignment.iteration - self._slowest())
            if assignment.action in ("train", "checkpoint"):
                self._busy[worker] = self._next
                self._next += 1
            waited = perf_counter() - requested
            yield worker, replace(assignment, ahead=ahead, waited_seconds=waited)

    def _slowest(self) -> int:
        """Return the earliest batch that a worker computes."""
        return min(self._busy.values(), default=self._next) // self._workers

    def _decide(self, request: AssignmentRequest) -> Assignment | None:
        """Return None if the worker has to wait."""
        batch, part = divmod(self._next, self._workers)
        are_all_waiting = len(self._waiting) == self._workers
        if self._last_action is None and are_all_waiting:
            self._last_action = self._ending(batch, part, request)
        if self._last_action is not None:
            return Assignment(batch, part, self._last_action)
        if self._ending(batch, part, request) is not None:
            return None
        if (
            request.checkpoint_every
            and batch > request.first
            and batch % request.checkpoint_every == 0
        ):
            # Each worker gets one part of the batch after a checkpoint: the checkpoint's
            # collectives block the first workers until all others arrive.
            return Assignment(batch, part, "checkpoint") if part > 0 or are_all_waiting else None
        if self._staleness is not None and batch - self._slowest() > self._staleness:
            return None
        return Assignment(batch, part)

    def _ending(self, batch: int, part: int, request: AssignmentRequest) -> Action | None:
        """Return the action that ends the run here; None if the run continues."""
        if self._finishing or batch >= request.total:
            return "end"
        # Stop only between batches, so that a resumed run uses each sample once.
        return "stop" if self._stopping and part == 0 else None
