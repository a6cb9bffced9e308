"""A worker's side of the huddles: when to meet, what to bring, what to make of it."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from paceline.config import RunConfig
from paceline.sync.replica import Replica
from paceline.sync.strategy import Strategy
from paceline.worker.huddle import (
    ClockOffset,
    Notes,
    huddle,
    measure_clock_offset,
    settle_waits,
)

COMPUTING = ("input", "forward", "backward")
"""The phases that a faster worker would spend less time in."""


FIRST_CLOCK_SECONDS, MOST_CLOCK_SECONDS = 5.0, 120.0
"""Between two measurements of the clocks' offset: short at first, to know their drift early on,
then twice as long each time."""


class Teamwork:
    def __init__(self, config: RunConfig, strategy: Strategy, replica: Replica) -> None:
        self.shares = config.share_weights
        """How the next batches are dealt, by rank."""
        self._accumulate = config.accumulate
        self.layers_meet = config.sync_bn and replica.communicator.world_size > 1
        """Whether layers communicate, so that all workers must compute the same parts together."""
        self._follows_speed = config.shares == ("auto",)
        self._replica = replica
        self._clock = replica.clock
        self._communicator = replica.communicator
        self._is_alone = replica.communicator.world_size == 1
        self._meets = strategy.lockstep and not self._is_alone
        self.clock_offset = ClockOffset()
        """What to add to this worker's clock to get the first worker's; 0 where none was asked."""
        if self._meets:
            self.clock_offset = ClockOffset(measure_clock_offset(replica.communicator))
        self._clock_seconds = FIRST_CLOCK_SECONDS
        self._clocks_measured = perf_counter()
        self._begin_notes()
        self._iterations_left = 1

    def _begin_notes(self) -> None:
        self._iterations = 0
        self._seconds = 0.0
        self._samples = 0
        self._computed_before = self._computing_seconds()

    def _computing_seconds(self) -> float:
        return sum(self._clock.seconds[phase] for phase in COMPUTING)

    def parts(self, samples: int) -> int:
        """In how many parts to compute so many samples."""
        return min(self._accumulate, samples)

    def wants_to_stop(self, seconds: float, samples: int, stop: bool) -> bool:
        """After an iteration of so many seconds and samples: whether to stop now, all of them."""
        if self._is_alone:
            return stop
        if not self._meets:
            # Out of lockstep that is told when the next turn is claimed.
            return False
        self._iterations += 1
        self._seconds += seconds
        self._samples += samples
        self._iterations_left -= 1
        return self._iterations_left == 0 and self._meet(stop)

    def _meet(self, stop: bool) -> bool:
        notes = Notes(
            stop=stop,
            compute_seconds=self._computing_seconds() - self._computed_before,
            samples=self._samples,
            seconds_per_iteration=self._seconds / self._iterations,
            # One worker decides, so that all measure equally often.
            measure_clocks=self._communicator.rank == 0
            and perf_counter() - self._clocks_measured >= self._clock_seconds,
        )
        # Between iterations, so in no phase of theirs: else phases would not add up to their times.
        with self._clock.during("other"):
            agreement = huddle(self._communicator, notes)
            if agreement.measure_clocks:
                self._measure_clocks()
            self.settle()
        self._iterations_left = agreement.iterations_to_next
        if self._follows_speed:
            self.shares = follow(self.shares, agreement.speeds)
        self._begin_notes()
        return agreement.stop

    def _measure_clocks(self) -> None:
        """Collective."""
        self.clock_offset.add(measure_clock_offset(self._communicator))
        self._clocks_measured = perf_counter()
        self._clock_seconds = min(2 * self._clock_seconds, MOST_CLOCK_SECONDS)

    def settle(self) -> None:
        """Tell waiting from communicating in the exchanges since the last time. Collective."""
        if self._meets:
            settle_waits(self._communicator, self._clock, self._replica.exposed, self.clock_offset)


def follow(shares: Sequence[float], speeds: Sequence[float]) -> list[float]:
    """Shares by speed; who has none, having got no sample, keeps its part beside the others."""
    measured = [number for number, speed in enumerate(speeds) if speed > 0]
    if not measured:
        return list(shares)
    scale = sum(speeds[number] for number in measured) / sum(shares[number] for number in measured)
    return [speed or share * scale for share, speed in zip(shares, speeds, strict=True)]
