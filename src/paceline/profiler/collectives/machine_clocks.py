"""Offsets between the clocks of machines, from the collectives that connect them.

No rank of a symmetric collective ends before every rank has arrived. Each end on one machine is
therefore after each arrival on another one, which bounds the offset between their clocks from both
sides; the tightest bounds of many collectives are close to each other.

Of collectives on a GPU, only the launch and the duration are known, which bound nothing. Without
others, the offset is that of the times of day.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.profiler.collectives.log import OPERATIONS, RankCollectives

Floats = npt.NDArray[np.float64]

SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "barrier", "all_to_all")

WINDOW_SECONDS = 30.0
"""Clocks of two machines drift apart by about 20 us per second, so bounds are valid for a while."""


@dataclass
class ClockOffsets:
    """Seconds to add to a rank's clock to get the clock of the first rank."""

    moments: dict[int, Floats] = field(default_factory=dict)
    """By rank, in its clock; ranks without an entry share the clock of the first."""
    seconds: dict[int, Floats] = field(default_factory=dict)

    def at(self, ranks: npt.NDArray[np.int64], moments: Floats) -> Floats:
        """The offset of each rank at a time of its clock."""
        result = np.zeros(len(moments))
        for rank, known in self.moments.items():
            rows = ranks == rank
            result[rows] = np.interp(moments[rows], known, self.seconds[rank])
        return result


def measure_offsets(
    logs: Mapping[int, RankCollectives],
    table: npt.NDArray[Any],
    begins: npt.NDArray[np.int64],
    is_complete: npt.NDArray[np.bool_],
) -> ClockOffsets:
    """`table` holds the records of each collective from its row in `begins`."""
    offsets = ClockOffsets()
    machines: dict[str, list[int]] = {}
    for rank, log in sorted(logs.items()):
        machines.setdefault(log.machine, []).append(rank)
    if len(machines) < 2 or not len(table):
        return offsets
    symmetric = [OPERATIONS.index(name) for name in SYMMETRIC]
    usable = is_complete & np.isin(table["operation"][begins], symmetric)
    usable &= ~np.logical_or.reduceat(table["on_gpu"], begins)
    reference, *others = machines.values()
    first_arrivals, first_ends = _extremes(table, begins, reference)
    for ranks in others:
        arrivals, ends = _extremes(table, begins, ranks)
        known = usable & np.isfinite(arrivals + ends + first_arrivals + first_ends)
        moments, seconds = _bounded(
            arrivals[known],
            lower=(first_arrivals - ends)[known],
            upper=(first_ends - arrivals)[known],
        )
        if not len(moments):
            wall = logs[ranks[0]].wall_offset - logs[reference[0]].wall_offset
            moments, seconds = np.zeros(1), np.array([wall])
        for rank in ranks:
            offsets.moments[rank], offsets.seconds[rank] = moments, seconds
    return offsets


def _extremes(
    table: npt.NDArray[Any], begins: npt.NDArray[np.int64], ranks: list[int]
) -> tuple[Floats, Floats]:
    """The last arrival and the first end of these ranks in each collective; infinite if unknown."""
    own = np.isin(table["rank"], ranks)
    arrivals = np.where(own, table["arrival"], -np.inf)
    ends = np.where(own & (table["end"] > 0), table["end"], np.inf)
    return np.maximum.reduceat(arrivals, begins), np.minimum.reduceat(ends, begins)


def _bounded(moments: Floats, lower: Floats, upper: Floats) -> tuple[Floats, Floats]:
    """The middle between the tightest bounds of each window."""
    centers, middles = [], []
    order = np.argsort(moments)
    moments, lower, upper = moments[order], lower[order], upper[order]
    if len(moments):
        window = ((moments - moments[0]) // WINDOW_SECONDS).astype(np.int64)
        firsts = np.flatnonzero(np.concatenate([[True], window[1:] != window[:-1]]))
        lasts = np.append(firsts[1:], len(moments))
        for first, last in zip(firsts, lasts, strict=True):
            centers.append(moments[first:last].mean())
            middles.append((lower[first:last].max() + upper[first:last].min()) / 2)
    return np.array(centers), np.array(middles)
