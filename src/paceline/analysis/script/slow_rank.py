"""Stragglers of a profiled script: which rank, in which phase and since which step.

In synchronous training a slow rank waits little itself, while the others wait for it. The phase in
which it loses time shows only in comparison with the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.analysis.curves import Floats
from paceline.analysis.ranks import MOSTLY, SLOWER, WAIT_SHARE
from paceline.analysis.script.profile import Line, RankFacts, ScriptProfile
from paceline.analysis.script.rank_windows import BUSY, RankWindows

WINDOWS_MIN = 3
"""Minimum number of slow windows of a straggler: one or two may be noise."""
SUSTAINED = 0.8
"""It is slow in at least this share of the windows since it became slow."""
CORE_WAIT_ERROR = 0.15
"""Of the time without a core: less than this may be its effect, since caches are cold after it."""


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
    has_neighbors: bool = False
    """Whether other ranks, which are not slow, run on the same machine."""


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
    queue = _queue_seconds(profile.ranks, windows)
    slow = _slowest(windows, queue)
    if slow is not None:
        rank = profile.ranks[slow.row]
        loaders = sorted(rank.loaders, key=lambda one: -one.seconds)
        return SlowRank(
            slow.excess / slow.step_seconds,
            rank.rank,
            rank.host,
            slow.phase,
            slow.seconds,
            slow.others_seconds,
            since=round(windows.steps[slow.begin]) if slow.begin else None,
            line=loaders[0].line if slow.phase == "input" and loaders else None,
            has_neighbors=sum(one.host == rank.host for one in profile.ranks) > 1,
        )
    late = _slowest(windows, np.zeros_like(queue))
    if late is None:
        return None
    rank, waited = profile.ranks[late.row], (queue[late.row] - _of_others(queue, late.row))
    seconds = float(np.median(waited[late.begin :]))
    if seconds < MOSTLY * late.excess:
        return None
    return WaitsForCore(late.excess / late.step_seconds, rank.rank, rank.host, seconds)


def _queue_seconds(ranks: Sequence[RankFacts], windows: RankWindows) -> Floats:
    """How long the training thread of each rank waited for a core; 0 where it is not known."""
    rows = []
    for rank in ranks:
        known = [
            (one.steps, one.main_queue_seconds)
            for one in rank.samples
            if one.main_queue_seconds is not None
        ]
        steps, totals = zip(*known, strict=True) if known else ((0,), (0.0,))
        rows.append(np.diff(np.interp(windows.steps, steps, totals)) / np.diff(windows.steps))
    return np.array(rows)


def _slowest(windows: RankWindows, queue: Floats) -> _Slowness | None:
    found = [
        one
        for row in range(len(windows.ranks))
        if (one := _slowness(windows, queue, row)) is not None
    ]
    return max(found, key=lambda one: one.excess, default=None)


@dataclass(frozen=True, slots=True)
class _Slowness:
    """How much longer a rank takes than the others, since the window in which that began."""

    row: int
    begin: int
    excess: float
    seconds: float
    others_seconds: float
    step_seconds: float
    phase: str


def _slowness(windows: RankWindows, queue: Floats, row: int) -> _Slowness | None:
    """None if the rank is no straggler. `queue` does not count as its work."""
    busy = np.maximum(windows.busy - queue, 0.0)
    steps = np.maximum(windows.step_seconds - queue.mean(axis=0), 0.0)
    excess = busy[row] - _of_others(busy, row)
    is_slow = (excess >= WAIT_SHARE * steps) & (busy[row] >= SLOWER * _of_others(busy, row))
    begin = next(
        (one for one in range(len(steps)) if is_slow[one] and is_slow[one:].mean() >= SUSTAINED),
        None,
    )
    if begin is None or len(steps) - begin < WINDOWS_MIN:
        return None
    usual = float(np.median(excess[begin:]))
    if usual < CORE_WAIT_ERROR * float(np.median(queue[row][begin:])):
        return None
    # In synchronous training, what it takes longer is what the others wait longer.
    communication = windows.communication
    waited = _of_others(communication, row) - communication[row]
    if float(np.median(waited[begin:])) < MOSTLY * usual:
        return None
    by_phase = {
        phase: float(np.median((seconds[row] - _of_others(seconds, row))[begin:]))
        for phase, seconds in windows.seconds.items()
        if phase in BUSY
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
