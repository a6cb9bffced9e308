"""Stragglers of a profiled script: which rank, in which phase and since which step.

In synchronous training a slow rank waits little itself, while the others wait for it. The phase in
which it loses time shows only in comparison with the other ranks.

Even on an idle machine, ranks differ by 10 to 30% for a second or two, for example because of the
threads that communicate during the backward pass. A run may last only a few windows. So all its
windows together must show, by a t-test, that a rank is slower than what is accepted. A rank that
became slow during the run must show that it changed, by a test that is corrected for the number of
windows it could have changed in: a few slow windows at the end of a run do not suffice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.analysis.curves import Floats
from paceline.analysis.ranks import MOSTLY, SLOWER, WAIT_SHARE
from paceline.analysis.script.profile import Line, RankFacts, ScriptProfile
from paceline.analysis.script.rank_windows import BUSY, RankWindows
from paceline.analysis.statistics import ALPHA, t_quantile

WINDOWS_MIN = 3
"""Minimum number of windows in which a rank is a straggler: one or two may be noise."""
SINCE_CHANGE_MIN = 6
"""Of one that was not slow before: of a run without faults, two seconds may look like that."""
LEAST_DEVIATION = 0.01
"""Of the step time: windows vary by at least this much, even where a few happen to be equal."""
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
    # The records do not say in which phases, so the time is spread over the step.
    slow = _slowest(windows, queue * windows.busy / (windows.busy + windows.communication))
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
    others = _of_others(busy, row)
    excess = busy[row] - others
    accepted = [WAIT_SHARE * steps, (SLOWER - 1) * others, CORE_WAIT_ERROR * queue[row]]
    margin = (excess - np.maximum.reduce(accepted)) / windows.step_seconds
    begin = _slow_since(margin, len(windows.ranks))
    if begin is None:
        return None
    usual = float(np.median(excess[begin:]))
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
        float(np.median(others[begin:])),
        float(np.median(steps[begin:])),
        max(by_phase, key=lambda phase: by_phase[phase]),
    )


def _slow_since(margin: Floats, ranks: int) -> int | None:
    """The first of the windows in which a rank is slower than accepted; None if it is not.

    `margin`: by how much in each window, as a share of the step time. It is the first window of
    all unless the rank changed.
    """
    begins = range(1, len(margin) - SINCE_CHANGE_MIN + 1)
    tests = len(begins) * ranks
    changes = {begin: _change(margin, begin) for begin in begins}
    begin = max(changes, key=lambda one: changes[one], default=0)
    if begin and not changes[begin] > t_quantile(len(margin) - 2, 2 * ALPHA / tests):
        begin = 0
    after = margin[begin:]
    if len(after) < WINDOWS_MIN or np.median(after) < 0:
        return None
    error = _deviation(margin, begin) / math.sqrt(len(after))
    degrees = len(margin) - (2 if begin else 1)
    critical = t_quantile(degrees, 2 * ALPHA / (tests if begin else ranks))
    return begin if after.mean() > critical * error else None


def _change(values: Floats, begin: int) -> float:
    """Student's t of the increase at a window."""
    before, after = values[:begin], values[begin:]
    error = _deviation(values, begin) * math.sqrt(1 / len(before) + 1 / len(after))
    return float(after.mean() - before.mean()) / error


def _deviation(values: Floats, begin: int) -> float:
    """Standard deviation of single windows, given that their mean changes at `begin`."""
    parts = [one for one in (values[:begin], values[begin:]) if len(one)]
    squares = math.fsum(float(((one - one.mean()) ** 2).sum()) for one in parts)
    return max(LEAST_DEVIATION, math.sqrt(squares / max(1, len(values) - len(parts))))


def _of_others(values: Floats, row: int) -> Floats:
    return np.asarray(np.median(np.delete(values, row, axis=0), axis=0))
