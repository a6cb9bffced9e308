"""A synchronous update on a server: all workers bring a gradient, the sum is applied once."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

from torch import Tensor

from paceline.errors import PeerError


class Rounds:
    """Serves all workers, each from a thread of its own. A worker that has not been answered brings
    nothing new, so there is one round at a time."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._changed = Condition()
        self._brought: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        self._squares = 0.0
        self._summed = 0
        self._applied = 0
        self._gave_up = False

    def bring(self, worker: int, gradient: Tensor) -> tuple[int, float]:
        """Returns when all have come: the round's number, and the sum of squares of the total."""
        with self._changed:
            number = self._summed + 1
            self._brought[worker] = gradient
            if len(self._brought) == self._workers:
                self._sum()
            while self._summed < number:
                if self._gave_up:
                    raise PeerError("a worker is gone")
                self._changed.wait()
            return number, self._squares

    def _sum(self) -> None:
        # In the order of the ranks, whoever came first: the same bits in every run.
        first, *others = (self._brought[worker] for worker in range(self._workers))
        for other in others:
            first.add_(other)
        self._total = first
        self._squares = float(first.double().square().sum())
        self._brought.clear()
        self._summed += 1
        self._changed.notify_all()

    def apply(self, number: int, update: Callable[[Tensor], None]) -> None:
        """Update with the total of a round, unless another thread has done so."""
        with self._changed:
            if self._applied < number and self._total is not None:
                update(self._total)
                self._applied = number

    def give_up(self) -> None:
        """Let nobody wait any longer: somebody who would have to come is gone."""
        with self._changed:
            self._gave_up = True
            self._changed.notify_all()
