"""Coordination of synchronous workers, about once a second.

They agree whether to stop, rebalance the next batches by measured throughput, and tell waiting from
communicating: the moments at which each worker reached an exchange show which one was waited for.
All workers come to the same conclusions, because all of them see the same numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.comm.objects import gather_scalars
from paceline.config import RunConfig
from paceline.measure.phase_clock import PhaseClock
from paceline.strategies.replica import ExposedIntervals, Replica
from paceline.strategies.strategy import Strategy

SECONDS_BETWEEN = 1.0
MOST_ITERATIONS_BETWEEN = 1000
OFFSET_ROUNDS = 9

_STOP, _COMPUTE_SECONDS, _SAMPLES, _SECONDS_PER_ITERATION, _MEASURE_CLOCKS = range(5)


@dataclass(slots=True)
class StepStats:
    """What one worker brings to a huddle, since the last one."""

    stop: bool = False
    compute_seconds: float = 0.0
    samples: int = 0
    seconds_per_iteration: float = 0.0
    measure_clocks: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    stop: bool
    speeds: list[float]
    """Samples a second of computing, of each worker."""
    iterations_to_next: int
    measure_clocks: bool
    """Whether to compare the clocks now, as any of the workers wants."""


def exchange_stats(communicator: Communicator, notes: StepStats) -> Decision:
    """Collective."""
    own = torch.tensor(
        [
            notes.stop,
            notes.compute_seconds,
            notes.samples,
            notes.seconds_per_iteration,
            notes.measure_clocks,
        ],
        dtype=torch.float64,
    )
    table = gather_scalars(communicator, own)
    seconds = float(table[:, _SECONDS_PER_ITERATION].max())
    iterations = round(SECONDS_BETWEEN / seconds) if seconds else 1
    speeds = table[:, _SAMPLES] / table[:, _COMPUTE_SECONDS].clamp(min=1e-9)
    return Decision(
        stop=bool(table[:, _STOP].any()),
        speeds=speeds.tolist(),
        iterations_to_next=min(max(1, iterations), MOST_ITERATIONS_BETWEEN),
        measure_clocks=bool(table[:, _MEASURE_CLOCKS].any()),
    )


def attribute_waits(
    communicator: Communicator, clock: PhaseClock, exposed: ExposedIntervals, offset: ClockOffset
) -> None:
    """Move from exchange to wait what each exchange spent waiting for the last to come. Collective.

    `offset`: of this worker's clock.
    """
    own = torch.frombuffer(exposed.began, dtype=torch.float64) if exposed.began else torch.empty(0)
    offsets = [offset.at(moment) for moment in exposed.began]
    arrivals = gather_scalars(communicator, own + torch.tensor(offsets, dtype=torch.float64))
    late = arrivals.amax(0) - arrivals[communicator.rank]
    lengths = torch.frombuffer(exposed.ended, dtype=torch.float64) - own if exposed.began else own
    waited = torch.minimum(late, lengths)
    clock.move("exchange", "wait", float(waited.sum()))
    if clock.log is not None:
        for began, seconds in zip(exposed.began, waited.tolist(), strict=True):
            clock.log.relabel("exchange", "wait", began, began + seconds)
    exposed.clear()


@dataclass(frozen=True, slots=True)
class OffsetSample:
    """One measurement of what to add to this worker's clock to get the first worker's."""

    moment: float
    seconds: float
    error_seconds: float = 0.0
    """At most so much is the measurement off: half of its round trip."""


HIGHEST_DRIFT = 200e-6
"""Seconds per second: more than any two working clocks drift apart."""


class ClockOffset:
    """What to add to this worker's clock to get the first worker's, as measured from time to time.

    The clocks of two machines drift apart, by some 20 us a second. Between two measurements the
    offset is interpolated. After the last one it continues with the drift between the first and the
    last, unless errors of measurement can explain that: extrapolation would amplify them.
    """

    def __init__(self, *samples: OffsetSample) -> None:
        self._samples = list(samples) or [OffsetSample(0.0, 0.0)]

    def add(self, sample: OffsetSample) -> None:
        """A later measurement than those before."""
        self._samples.append(sample)

    def at(self, moment: float) -> float:
        """At a moment of this worker's own clock."""
        samples = self._samples
        if moment <= samples[0].moment:
            return samples[0].seconds
        later = bisect_right(samples, moment, key=lambda sample: sample.moment)
        earlier = samples[later - 1]
        if later == len(samples):
            return earlier.seconds + self._drift() * (moment - earlier.moment)
        return earlier.seconds + _drift_between(earlier, samples[later]) * (moment - earlier.moment)

    def _drift(self) -> float:
        """Over the longest interval, in which errors of measurement weigh least."""
        first, last = self._samples[0], self._samples[-1]
        if abs(last.seconds - first.seconds) <= first.error_seconds + last.error_seconds:
            return 0.0
        return max(-HIGHEST_DRIFT, min(_drift_between(first, last), HIGHEST_DRIFT))


def _drift_between(first: OffsetSample, second: OffsetSample) -> float:
    return (second.seconds - first.seconds) / (second.moment - first.moment)


def measure_clock_offset(communicator: Communicator, node: int | None = None) -> OffsetSample:
    """Collective.

    The round trip that took least had the least chance to be lopsided. Workers on rank 0's `node`
    have its clock.
    """
    clock_and_node = torch.zeros(2, dtype=torch.float64)
    own_node = -1 if node is None else node
    sample = OffsetSample(perf_counter(), 0.0)
    for rank in range(1, communicator.world_size):
        if communicator.rank == 0:
            for _ in range(OFFSET_ROUNDS):
                communicator.recv(clock_and_node, rank, "control").wait()
                clock_and_node[0], clock_and_node[1] = perf_counter(), own_node
                communicator.send(clock_and_node, rank, "control").wait()
        elif communicator.rank == rank:
            rounds = [_one_round(communicator, clock_and_node) for _ in range(OFFSET_ROUNDS)]
            sample = min(rounds, key=lambda each: each.error_seconds)
            if own_node >= 0 and int(clock_and_node[1]) == own_node:
                sample = OffsetSample(sample.moment, 0.0)
    return sample


def _one_round(communicator: Communicator, scratch: Tensor) -> OffsetSample:
    began = perf_counter()
    communicator.send(scratch, 0, "control").wait()
    communicator.recv(scratch, 0, "control").wait()
    ended = perf_counter()
    middle = (began + ended) / 2
    return OffsetSample(middle, float(scratch[0]) - middle, (ended - began) / 2)


COMPUTING = ("input", "forward", "backward")
"""The phases that a faster worker would spend less time in."""


FIRST_CLOCK_SECONDS, MOST_CLOCK_SECONDS = 5.0, 120.0
"""Between two measurements of the clocks' offset: short at first, to know their drift early on,
then twice as long each time."""


class StepCoordinator:
    def __init__(self, config: RunConfig, strategy: Strategy, replica: Replica) -> None:
        self.shares = config.share_weights
        """How the next batches are dealt, by rank."""
        self._follows_speed = config.shares == ("auto",)
        self._replica = replica
        self._clock = replica.clock
        self._communicator = replica.communicator
        self._is_alone = replica.communicator.world_size == 1
        self._meets = strategy.synchronous and not self._is_alone
        self.clock_offset = ClockOffset()
        """What to add to this worker's clock to get the first worker's; 0 where none was asked."""
        self._clock_seconds = FIRST_CLOCK_SECONDS
        self._iterations_left = 1

    def start(self) -> None:
        """Call right before the first step. Collective."""
        if self._meets:
            sample = measure_clock_offset(self._communicator, self._replica.node)
            self.clock_offset = ClockOffset(sample)
        self._clocks_measured = perf_counter()
        self._settled_phases = dict(self._clock.seconds)
        self._begin_notes()

    def _begin_notes(self) -> None:
        self._iterations = 0
        self._seconds = 0.0
        self._samples = 0
        self._computed_before = self._computing_seconds()

    def _computing_seconds(self) -> float:
        return sum(self._clock.seconds[phase] for phase in COMPUTING)

    def after_step(self, seconds: float, samples: int, stop: bool) -> bool:
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
        notes = StepStats(
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
            agreement = exchange_stats(self._communicator, notes)
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
        self.clock_offset.add(measure_clock_offset(self._communicator, self._replica.node))
        self._clocks_measured = perf_counter()
        self._clock_seconds = min(2 * self._clock_seconds, MOST_CLOCK_SECONDS)

    def settle(self) -> None:
        """Tell waiting from communicating in the exchanges since the last time. Collective."""
        if self._meets:
            attribute_waits(
                self._communicator, self._clock, self._replica.exposed, self.clock_offset
            )
            self._settled_phases = dict(self._clock.seconds)

    @property
    def settled_phase_seconds(self) -> dict[str, float]:
        """What each phase had taken when waiting was last told from communicating."""
        return self._settled_phases if self._meets else self._clock.seconds


def follow(shares: Sequence[float], speeds: Sequence[float]) -> list[float]:
    """Shares by speed; who has none, having got no sample, keeps its part beside the others."""
    measured = [number for number, speed in enumerate(speeds) if speed > 0]
    if not measured:
        return list(shares)
    scale = sum(speeds[number] for number in measured) / sum(shares[number] for number in measured)
    return [speed or share * scale for share, speed in zip(shares, speeds, strict=True)]
