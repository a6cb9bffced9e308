"""What the records of a rank stand for, if recording was paused in some windows of steps.

In pauses, only DDP issues collectives (recording_windows.py): its records stand for those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    """From `began` on, each record of DDP stands for `weight` collectives."""

    began: float = math.inf
    weight: float = 1.0
    exchange_seconds: float = 0.0
    """Total of phase exchange at `began`."""
    recorded_share: float = 1.0
    """Of all steps."""

    def is_sampled(self, records: Records) -> npt.NDArray[np.bool_]:
        """Whether each record stands for `weight` collectives."""
        found: npt.NDArray[np.bool_] = (records["arrival"] >= self.began) & of_ddp(records)
        return found

    def parts(self, records: Records) -> list[tuple[Records, float]]:
        """Split records by what they stand for."""
        is_sampled = self.is_sampled(records)
        return [(records[~is_sampled], 1.0), (records[is_sampled], self.weight)]


def sampling_of(log: RankCollectives, last: float | None = None) -> Sampling:
    """`last`: the end of the last step, by the clock of the rank; None for all that is known.

    The sampled period begins with the window that was recorded before the first pause, so its
    records are those of steps like the ones in pauses.
    """
    if not log.pauses:
        return Sampling()
    first, final = log.pauses[0], log.pauses[-1]
    records = recorded(log.records)
    records = records[of_ddp(records)]
    moments = records["arrival"][records["arrival"] >= first.window_began]
    if last is not None:
        moments = moments[moments <= last]
    calls = len(moments)
    if not calls:
        return Sampling()
    paused = sum(_known_calls(pause) or 0 for pause in log.pauses[:-1])
    if (moments > (final.ended or math.inf)).any():
        paused += _known_calls(final) or 0
    else:
        paused += _calls_of_last(log.pauses, calls, moments, last)
    ends = [
        final.updates if pause.updates_after is None else pause.updates_after
        for pause in log.pauses
    ]
    skipped = sum(end - pause.updates for end, pause in zip(ends, log.pauses, strict=True))
    return Sampling(
        first.window_began,
        1 + paused / calls,
        first.exchange_seconds,
        1 - skipped / max(1, ends[-1]),
    )


def of_ddp(records: Records) -> npt.NDArray[np.bool_]:
    """Whether DDP issued each of them, for its gradients or buffers."""
    found: npt.NDArray[np.bool_] = (records["flags"] & (BACKWARD | BUFFERS)) != 0
    return found


def recorded(records: Records) -> Records:
    """Without those that only the flight recorder has."""
    own: Records = records[(records["flags"] & TRACED) == 0]
    return own


def _known_calls(pause: Pause) -> int | None:
    """How many collectives were called in a pause; None if unknown."""
    if not pause.known_calls or pause.known_calls.keys() < pause.calls.keys():
        return None
    return sum(known - pause.calls.get(index, 0) for index, known in pause.known_calls.items())


def _calls_of_last(pauses: list[Pause], calls: int, moments: np.ndarray, last: float | None) -> int:
    """In a pause that lasted until the end, without those after the last step."""
    final = pauses[-1]
    known = _known_calls(final)
    if final.updates_after is None:
        if last is None:
            return known or 0
        # The process was killed.
        seconds = sum((pause.ended or pause.began) - pause.began for pause in pauses)
        rate = calls / max(1e-9, final.began - pauses[0].window_began - seconds)
        return round(rate * max(0.0, last - final.began))
    skipped = sum((pause.updates_after or 0) - pause.updates for pause in pauses)
    steps = final.updates_after - pauses[0].window_updates - skipped
    expected = round(calls / max(1, steps) * (final.updates_after - final.updates))
    return expected if known is None else min(known, expected)
