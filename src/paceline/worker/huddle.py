"""About once a second the workers put their heads together.

They agree whether to stop, deal the next batches by how fast each of them is, and tell waiting from
communicating: from the moments at which they came to each exchange, everyone can see who was waited
for. All of them come to the same conclusions, because all of them see the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.measure.clock import PhaseClock
from paceline.sync.replica import Exposed

SECONDS_BETWEEN = 1.0
MOST_ITERATIONS_BETWEEN = 1000
OFFSET_ROUNDS = 9

_STOP, _COMPUTE_SECONDS, _SAMPLES, _SECONDS_PER_ITERATION, _COLUMNS = range(5)


@dataclass(slots=True)
class Notes:
    """What one worker brings to a huddle, since the last one."""

    stop: bool = False
    compute_seconds: float = 0.0
    samples: int = 0
    seconds_per_iteration: float = 0.0


@dataclass(frozen=True, slots=True)
class Agreement:
    stop: bool
    speeds: list[float]
    """Samples a second of computing, of each worker."""
    iterations_to_next: int


def huddle(communicator: Communicator, notes: Notes) -> Agreement:
    """Collective."""
    table = torch.zeros(communicator.world_size, _COLUMNS, dtype=torch.float64)
    table[communicator.rank] = torch.tensor(
        [notes.stop, notes.compute_seconds, notes.samples, notes.seconds_per_iteration],
        dtype=torch.float64,
    )
    communicator.all_reduce(table, "control").wait()
    seconds = float(table[:, _SECONDS_PER_ITERATION].max())
    iterations = round(SECONDS_BETWEEN / seconds) if seconds else 1
    speeds = table[:, _SAMPLES] / table[:, _COMPUTE_SECONDS].clamp(min=1e-9)
    return Agreement(
        stop=bool(table[:, _STOP].any()),
        speeds=speeds.tolist(),
        iterations_to_next=min(max(1, iterations), MOST_ITERATIONS_BETWEEN),
    )


def settle_waits(
    communicator: Communicator, clock: PhaseClock, exposed: Exposed, offset_seconds: float
) -> None:
    """Move from exchange to wait what each exchange spent waiting for the last to come. Collective.

    `offset_seconds` is what must be added to this worker's clock to get the first worker's.
    """
    arrivals = torch.zeros(communicator.world_size, len(exposed.began), dtype=torch.float64)
    own = torch.frombuffer(exposed.began, dtype=torch.float64) if exposed.began else torch.empty(0)
    arrivals[communicator.rank] = own + offset_seconds
    communicator.all_reduce(arrivals, "control").wait()
    late = arrivals.amax(0) - arrivals[communicator.rank]
    lengths = torch.frombuffer(exposed.ended, dtype=torch.float64) - own if exposed.began else own
    waited = torch.minimum(late, lengths)
    clock.move("exchange", "wait", float(waited.sum()))
    if clock.log is not None:
        for began, seconds in zip(exposed.began, waited.tolist(), strict=True):
            clock.log.relabel("exchange", "wait", began, began + seconds)
    exposed.clear()


def clock_offset_seconds(communicator: Communicator) -> float:
    """What to add to this worker's clock to get the first worker's. Collective.

    The round trip that took least had the least chance to be lopsided.
    """
    here = torch.zeros(1, dtype=torch.float64)
    offset = 0.0
    for rank in range(1, communicator.world_size):
        if communicator.rank == 0:
            for _ in range(OFFSET_ROUNDS):
                communicator.recv(here, rank, "control").wait()
                here[0] = perf_counter()
                communicator.send(here, rank, "control").wait()
        elif communicator.rank == rank:
            offset = min(_one_round(communicator, here) for _ in range(OFFSET_ROUNDS))[1]
    return offset


def _one_round(communicator: Communicator, scratch: Tensor) -> tuple[float, float]:
    """Round-trip time, and the offset that it shows."""
    began = perf_counter()
    communicator.send(scratch, 0, "control").wait()
    communicator.recv(scratch, 0, "control").wait()
    ended = perf_counter()
    return ended - began, float(scratch) - (began + ended) / 2
