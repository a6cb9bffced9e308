"""Stragglers of a profiled script: which rank, in which phase and since which step.

In synchronous training a slow rank waits little itself, while the others wait for it. The phase in
which it loses time shows only in comparison with the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from paceline.analysis.curves import Floats
from paceline.analysis.rank_windows import BUSY, RankWindows
from paceline.analysis.ranks import MOSTLY, SLOWER, WAIT_SHARE
from paceline.analysis.script_profile import Line, RankFacts, ScriptProfile

WINDOWS_MIN = 3
"""A straggler is slow in at least so many windows: one or two may be a disturbance."""
SUSTAINED = 0.8
"""It is slow in at least this share of the windows since it became slow."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A straggler: one rank takes longer in a phase, and the others wait for it."""

    share: float
    """Of the step time that the others wait."""
    rank: int
    host: str
    phase: str
    seconds: float
    """Outside communication, per step."""
    others_seconds: float
    since: int | None
    """The step since when it is slow; None from the beginning."""
    line: Line | None = None
    """The DataLoader, if the phase is input."""


@dataclass(frozen=True, slots=True)
class WaitsForCore:
    """A rank is slower than the others because its threads do not get a core."""

    share: float
    rank: int
    host: str
    queue_seconds: float
    """Per step."""


def find_slow_rank(profile: ScriptProfile) -> SlowRank | WaitsForCore | None:
    """The straggler; None if there is none."""
    windows = profile.windows
    if windows is None or len(windows.ranks) < 2:
        return None
    slow = max(
        (_slowness(windows, row) for row in range(len(windows.ranks))), key=lambda one: one.excess
    )
    if slow.begin is None:
        return None
    rank = profile.ranks[slow.row]
    share = slow.excess / slow.step_seconds
    queue = _queue_excess(profile.ranks, slow.row)
    if queue is not None and queue >= MOSTLY * slow.excess:
        return WaitsForCore(share, rank.rank, rank.host, queue)
    loaders = sorted(rank.loaders, key=lambda one: -one.seconds)
    return SlowRank(
        share,
        rank.rank,
        rank.host,
        slow.phase,
        slow.seconds,
        slow.others_seconds,
        since=round(windows.steps[slow.begin]) if slow.begin else None,
        line=loaders[0].line if slow.phase == "input" and loaders else None,
    )


@dataclass(frozen=True, slots=True)
class _Slowness:
    """How much longer a rank takes than the others, since the window in which that began."""

    row: int
    begin: int | None
    """None if it is not a straggler."""
    excess: float
    seconds: float = 0.0
    others_seconds: float = 0.0
    step_seconds: float = 1.0
    phase: str = ""


def _slowness(windows: RankWindows, row: int) -> _Slowness:
    busy, steps = windows.busy, windows.step_seconds
    excess = busy[row] - _of_others(busy, row)
    is_slow = (excess >= WAIT_SHARE * steps) & (busy[row] >= SLOWER * _of_others(busy, row))
    begin = next(
        (one for one in range(len(steps)) if is_slow[one] and is_slow[one:].mean() >= SUSTAINED),
        None,
    )
    if begin is None or len(steps) - begin < WINDOWS_MIN:
        return _Slowness(row, None, 0.0)
    usual = float(np.median(excess[begin:]))
    # In synchronous training, what it takes longer is what the others wait longer.
    communication = windows.communication
    waited = _of_others(communication, row) - communication[row]
    if float(np.median(waited[begin:])) < MOSTLY * usual:
        return _Slowness(row, None, 0.0)
    by_phase = {
        phase: float(np.median((seconds[row] - _of_others(seconds, row))[begin:]))
        for phase in BUSY
        if (seconds := windows.seconds[phase]) is not None
    }
    return _Slowness(
        row,
        begin,
        usual,
        float(np.median(busy[row][begin:])),
        float(np.median(_of_others(busy, row)[begin:])),
        float(np.median(steps[begin:])),
        max(by_phase, key=lambda phase: by_phase[phase]),
    )


def _of_others(values: Floats, row: int) -> Floats:
    return np.asarray(np.median(np.delete(values, row, axis=0), axis=0))


def _queue_excess(ranks: Sequence[RankFacts], row: int) -> float | None:
    """Seconds per step that a rank waits longer for a core than the others; None if unknown."""
    waited = [_per_step(one, "main_queue_seconds") for one in ranks]
    known = [one for one in waited if one is not None]
    if len(known) < len(ranks):
        return None
    return known[row] - median(known[:row] + known[row + 1 :])


def _per_step(rank: RankFacts, name: str) -> float | None:
    spent = rank.between(name)
    steps = rank.samples[-1].steps - rank.samples[0].steps if rank.samples else 0
    return None if spent is None or not steps else spent / steps
