"""Disjoint intervals of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Intervals:
    """Disjoint intervals in the order of time."""

    began: Floats
    ended: Floats

    @property
    def seconds(self) -> float:
        return float((self.ended - self.began).sum())

    def until(self, moments: Floats) -> Floats:
        """The part before each of the given times, in seconds."""
        lengths = np.concatenate([[0.0], np.cumsum(self.ended - self.began)])
        index = np.searchsorted(self.began, moments, side="right")
        before = lengths[index]
        last = np.maximum(index - 1, 0)
        if not len(self.began):
            return before
        open_part = np.where(index > 0, np.maximum(self.ended[last] - moments, 0.0), 0.0)
        seconds: Floats = before - open_part
        return seconds

    def within(self, began: float, ended: float) -> float:
        """The part between two times, in seconds."""
        return float(self.between([began, ended])[0])

    def without(self, others: Sequence[Sequence[float]]) -> Intervals:
        """What is not in any of the given intervals, which begin and end at these times."""
        began, ended = self.began, self.ended
        for other_began, other_ended in others:
            if not np.any((began < other_ended) & (ended > other_began)):
                continue
            parts = (began, np.minimum(ended, other_began)), (np.maximum(began, other_ended), ended)
            began, ended = (np.concatenate(each) for each in zip(*parts, strict=True))
            order = np.flatnonzero(began < ended)
            order = order[np.argsort(began[order], kind="stable")]
            began, ended = began[order], ended[order]
        return Intervals(began, ended)

    def common(self, others: Intervals) -> Intervals:
        """What is in other intervals, too."""
        times = np.unique(np.concatenate([self.began, self.ended, others.began, others.ended]))
        middles = (times[:-1] + times[1:]) / 2
        is_common = self._contains(middles) & others._contains(middles)
        return Intervals(times[:-1][is_common], times[1:][is_common])

    def _contains(self, moments: Floats) -> npt.NDArray[np.bool_]:
        before = np.searchsorted(self.ended, moments), np.searchsorted(self.began, moments)
        contains: npt.NDArray[np.bool_] = before[0] < before[1]
        return contains

    def between(self, boundaries: Sequence[float] | Floats) -> Floats:
        """The part between each boundary and the next, in seconds."""
        return np.diff(self.until(np.asarray(boundaries, dtype=np.float64)))


def union(began: Floats, ended: Floats) -> Intervals:
    """Merge intervals that overlap."""
    order = np.argsort(began, kind="stable")
    began, ended = began[order], np.maximum.accumulate(ended[order]) if len(ended) else ended
    if not len(began):
        return Intervals(began, ended)
    is_new = began[1:] > ended[:-1]
    return Intervals(
        began[np.concatenate([[True], is_new])], ended[np.concatenate([is_new, [True]])]
    )
