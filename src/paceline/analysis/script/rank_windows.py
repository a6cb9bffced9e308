"""The phases of each rank over the course of a run, in windows of the same steps for all ranks.

Blocks of events end at different steps on each rank, so totals are interpolated between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.analysis.curves import Floats
from paceline.analysis.events import IN_ITERATION, WorkerEvents

WINDOWS_MAX = 32
COMMUNICATION = ("exchange", "wait")
BUSY = (*(phase for phase in IN_ITERATION if phase not in COMMUNICATION), "other")
"""Phases in which a rank does not communicate; `other` is the rest of the steps."""


@dataclass(frozen=True)
class RankWindows:
    """Mean seconds per step, by phase, of each rank (row) in each window (column)."""

    ranks: list[int]
    steps: Floats
    """Boundaries of the windows: one more than windows."""
    seconds: dict[str, Floats]

    @property
    def busy(self) -> Floats:
        return self.sum_of(BUSY)

    @property
    def communication(self) -> Floats:
        return self.sum_of(COMMUNICATION)

    @property
    def step_seconds(self) -> Floats:
        """Mean over the ranks."""
        return np.asarray((self.busy + self.communication).mean(axis=0))

    def sum_of(self, phases: tuple[str, ...]) -> Floats:
        return np.asarray(sum(self.seconds[phase] for phase in phases))


def rank_windows(events: Mapping[int, WorkerEvents]) -> RankWindows | None:
    """None if a rank has fewer than two blocks after its first one, or no phases."""
    totals = {rank: _totals(one) for rank, one in sorted(events.items())}
    known = {rank: one for rank, one in totals.items() if one is not None}
    if not known or len(known) < len(totals):
        return None
    begin = max(steps[0] for steps, _ in known.values())
    end = min(steps[-1] for steps, _ in known.values())
    count = min(WINDOWS_MAX, *(len(steps) - 1 for steps, _ in known.values()))
    if count < 2 or end - begin < count:
        return None
    bounds = np.linspace(begin, end, count + 1)
    widths = np.diff(bounds)
    seconds = {
        phase: np.array(
            [np.diff(np.interp(bounds, steps, of[phase])) / widths for steps, of in known.values()]
        )
        for phase in (*IN_ITERATION, "other")
    }
    return RankWindows(list(known), bounds, seconds)


def _totals(events: WorkerEvents) -> tuple[Floats, dict[str, Floats]] | None:
    """Ends of the blocks of the last process, and seconds by phase up to these."""
    last = events.blocks[-1].process if events.blocks else 0
    blocks = [block for block in events.blocks if block.process == last]
    if len(blocks) < 2 or any(block.phases is None for block in blocks):
        return None
    ends = np.array([block.end for block in blocks], dtype=np.float64)
    totals = {
        phase: np.array([block.phases[phase] for block in blocks if block.phases])
        for phase in IN_ITERATION
    }
    steps = np.cumsum([block.seconds.sum() for block in blocks])
    inside = np.diff(np.sum(list(totals.values()), axis=0))
    rest = np.maximum(np.diff(steps) - inside, 0.0)
    totals["other"] = np.concatenate([[0.0], np.cumsum(rest)])
    return ends, totals
