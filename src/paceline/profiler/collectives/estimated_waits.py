"""How long a rank waited for each of the others, if ranks paused recording in some steps.

Calls of the script are all recorded. In those of DDP, waiting is known where all ranks recorded
them: it is the same share of the exposed communication that follows, up to the next ones that all
ranks recorded. The shares of a run whose steps change, or in which another rank becomes the slowest
one, are therefore those of the time around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.profiler.collectives.intervals import Floats
from paceline.profiler.collectives.log import RankCollectives, Records
from paceline.profiler.collectives.sampling import of_ddp
from paceline.profiler.collectives.waiting import Waits, exposed

ROUNDING_SECONDS = 1e-6
"""Differences of times below this are rounding errors."""


@dataclass(frozen=True)
class EstimatedWaits:
    """From `since` on; before that, all ranks recorded everything."""

    since: float = np.inf
    caused: dict[int, float] = field(default_factory=dict)
    """How long the rank waited for each of the others."""

    @property
    def seconds(self) -> float:
        return sum(self.caused.values())


def estimate_waits(
    log: RankCollectives,
    waits: Waits,
    records: Records,
    exchange_seconds: float,
    last: float,
    interruptions: Sequence[Sequence[float]] = (),
) -> EstimatedWaits:
    """`exchange_seconds`: what the clock measured, and estimated in pauses, until `last`."""
    missed = waits.missed[log.rank]
    began = np.array([pause.window_began for pause in log.pauses])
    since = min(began.min(initial=np.inf), missed.began.min(initial=np.inf))
    if since >= last:
        return EstimatedWaits()
    edges = np.unique(np.concatenate([[since], began, missed.ended, [last]]))
    edges = edges[edges <= last]
    communication = exposed(records).without(interruptions)
    spent = communication.between(edges)
    if len(began) and began[0] < last:
        in_pauses = _by_clock(log, edges, exchange_seconds, last)
        # Before its first pause, the rank recorded everything.
        spent = np.where(edges[:-1] < began[0], spent, in_pauses)
    calls = exposed(records[~of_ddp(records)]).without(interruptions)
    called = calls.between(edges)
    compared = waits.compared[log.rank].without(interruptions).between(edges) - called
    source = _last_known(compared)
    caused = {}
    for other, waited in waits.waited_for[log.rank].items():
        in_steps = waited.without(interruptions)
        in_calls = in_steps.common(calls).between(edges)
        seconds = float(in_calls.sum())
        if source is not None:
            share = (in_steps.between(edges) - in_calls)[source] / compared[source]
            seconds += float((share * np.maximum(0.0, spent - called)).sum())
        caused[other] = seconds
    return EstimatedWaits(float(since), caused)


def _by_clock(log: RankCollectives, edges: Floats, exchange_seconds: float, last: float) -> Floats:
    """Exposed communication between the edges, by what the clock had when windows began."""
    known = [(one.window_began, one.exchange_seconds) for one in log.pauses]
    moments, totals = zip(*(one for one in known if one[0] < last), strict=True)
    return np.diff(np.interp(edges, [*moments, last], [*totals, exchange_seconds]))


def _last_known(compared: Floats) -> np.ndarray | None:
    """For each position, that of the last positive value up to it, or of the first one at all."""
    known = np.flatnonzero(compared > ROUNDING_SECONDS)
    if not len(known):
        return None
    at = np.searchsorted(known, np.arange(len(compared)), side="right") - 1
    return known[np.maximum(at, 0)]
