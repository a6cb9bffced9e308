"""What the records of a rank stand for, if recording was paused in some windows of steps.

In pauses, only DDP issues collectives (pauses.py). The process groups counted them: the
records of DDP in the window before a pause stand for those, so the estimate follows a script whose
steps change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.profiler.collectives.intervals import Floats
from paceline.profiler.collectives.log import (
    BACKWARD,
    BUFFERS,
    TRACED,
    Pause,
    RankCollectives,
    Records,
)


@dataclass(frozen=True)
class Sampling:
    """How many collectives each record of DDP stands for, by the time of its arrival."""

    began: float = math.inf
    """All records before this stand for themselves."""
    edges: Floats = field(default_factory=lambda: np.zeros(0))
    weights: Floats = field(default_factory=lambda: np.ones(1))
    """Before the first edge, between each and the next, and after the last one."""

    def weights_of(self, records: Records) -> Floats:
        at = np.searchsorted(self.edges, records["arrival"], side="right")
        return np.where(of_ddp(records), self.weights[at], 1.0)

    def parts(self, records: Records) -> list[tuple[Records, float]]:
        """Split records by what they stand for."""
        if math.isinf(self.began) or not len(records):
            return [(records, 1.0)]
        weights = self.weights_of(records)
        order = np.argsort(weights, kind="stable")
        values, begins = np.unique(weights[order], return_index=True)
        return list(zip(np.split(records[order], begins[1:]), values.tolist(), strict=True))


def sampling_of(log: RankCollectives, last: float | None = None) -> Sampling:
    """`last`: the end of the last step, by the clock of the rank; None for all that is known."""
    if not log.pauses:
        return Sampling()
    began = log.pauses[0].window_began
    records = recorded(log.records)
    records = records[of_ddp(records)]
    moments = records["arrival"][records["arrival"] >= began]
    if last is not None:
        moments = moments[moments <= last]
    if not len(moments):
        return Sampling()
    edges = np.array([edge for one in log.pauses for edge in (one.window_began, one.began)])
    # In the window before each pause.
    known = np.diff(np.searchsorted(moments, edges))[::2]
    paused = np.zeros(len(known))
    for index, pause in enumerate(log.pauses):
        is_last = bool(moments[-1] <= (pause.ended or math.inf))
        paused[index] = _calls_in(pause, int(known[index]), last, is_last=is_last)
    # No record stands for those of a pause after a window without records, so all do.
    unplaced = paused[known == 0].sum() / len(moments)
    weights = np.full(len(edges) + 1, 1 + unplaced)
    weights[0] = 1.0
    weights[1::2] += np.where(known > 0, paused / np.maximum(known, 1), 0.0)
    return Sampling(began, edges, weights)


def skipped_steps(log: RankCollectives, steps: int) -> int:
    """In how many of all steps recording was paused."""
    # That of a process that was killed in a pause lasted until then.
    ends = [steps if one.updates_after is None else one.updates_after for one in log.pauses]
    return sum(end - one.updates for end, one in zip(ends, log.pauses, strict=True))


def of_ddp(records: Records) -> npt.NDArray[np.bool_]:
    """Whether DDP issued each of them, for its gradients or buffers."""
    found: npt.NDArray[np.bool_] = (records["flags"] & (BACKWARD | BUFFERS)) != 0
    return found


def recorded(records: Records) -> Records:
    """Without those that only the flight recorder has."""
    own: Records = records[(records["flags"] & TRACED) == 0]
    return own


def _known_calls(pause: Pause) -> int | None:
    """How many collectives the process groups counted in a pause; None if one did not."""
    if not pause.known_calls or pause.known_calls.keys() < pause.calls.keys():
        return None
    return sum(known - pause.calls.get(index, 0) for index, known in pause.known_calls.items())


def _calls_in(pause: Pause, window_calls: int, last: float | None, *, is_last: bool) -> int:
    """How many collectives were called in a pause, which follows `window_calls` of its window.

    `is_last`: it lasted until the end, and those after the last step do not count.
    """
    known = _known_calls(pause)
    if pause.updates_after is None:
        if last is None:
            return known or 0
        # The process was killed.
        rate = window_calls / max(1e-9, pause.began - pause.window_began)
        return round(rate * max(0.0, last - pause.began))
    rate = window_calls / max(1, pause.updates - pause.window_updates)
    expected = round(rate * (pause.updates_after - pause.updates))
    if known is None:
        # A group was destroyed meanwhile.
        return expected
    return min(known, expected) if is_last else known
