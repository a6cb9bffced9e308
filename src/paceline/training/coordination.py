"""Coordination of synchronous ranks, about once a second.

Ranks decide together whether to stop, adapt their shares of the batch to measured throughput,
combine their measurements of gradients, and split exposed communication into waiting and transfer:
the time at which each rank reached a collective shows which rank the others waited for. All ranks
take the same decisions, because all see the same numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.comm.objects import all_gather_scalars
from paceline.config import RunConfig
from paceline.measure.gradient_noise import GradientNoise
from paceline.measure.phase_clock import ExposedIntervals, PhaseClock
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy

SECONDS_BETWEEN = 1.0
MAX_ITERATIONS_BETWEEN = 1000
OFFSET_ROUNDS = 9

_NOTHING = torch.empty(0, dtype=torch.float64)
_STOP, _COMPUTE_SECONDS, _SAMPLES, _SECONDS_PER_ITERATION, _MEASURE_CLOCKS = range(5)


@dataclass(slots=True)
class StepStats:
    """Measurements of one rank since the last exchange."""

    stop: bool = False
    compute_seconds: float = 0.0
    samples: int = 0
    seconds_per_iteration: float = 0.0
    measure_clocks: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of an exchange, equal on all ranks."""

    stop: bool
    speeds: list[float]
    """Samples per second of computation, by rank."""
    iterations_to_next: int
    measure_clocks: bool
    """Whether any rank asks to measure the clock offsets now."""


def exchange_stats(communicator: Communicator, stats: StepStats) -> Decision:
    """Combine the measurements of all ranks into one decision. Collective."""
    own = torch.tensor(
        [
            stats.stop,
            stats.compute_seconds,
            stats.samples,
            stats.seconds_per_iteration,
            stats.measure_clocks,
        ],
        dtype=torch.float64,
    )
    table = all_gather_scalars(communicator, own)
    seconds = float(table[:, _SECONDS_PER_ITERATION].max())
    iterations = round(SECONDS_BETWEEN / seconds) if seconds else 1
    speeds = table[:, _SAMPLES] / table[:, _COMPUTE_SECONDS].clamp(min=1e-9)
    return Decision(
        stop=bool(table[:, _STOP].any()),
        speeds=speeds.tolist(),
        iterations_to_next=min(max(1, iterations), MAX_ITERATIONS_BETWEEN),
        measure_clocks=bool(table[:, _MEASURE_CLOCKS].any()),
    )


def attribute_waits(
    communicator: Communicator,
    clock: PhaseClock,
    exposed: ExposedIntervals,
    offset: ClockOffset,
    along: Tensor = _NOTHING,
) -> Tensor:
    """Move the time until the last rank arrived from phase exchange to wait. Collective.

    `offset` is the offset of this rank's clock. `along` are further values of this rank, which
    travel in the same message; returns those of all ranks, one row per rank.
    """
    began, ended, arrived = (
        torch.tensor(each, dtype=torch.float64)
        for each in (exposed.began, exposed.ended, exposed.arrived)
    )
    offsets = torch.tensor([offset.at(moment) for moment in exposed.began], dtype=torch.float64)
    table = all_gather_scalars(communicator, torch.cat([along, arrived + offsets]))
    last_arrived = table[:, len(along) :].amax(0) - offsets
    waited = torch.minimum((last_arrived - began).clamp(min=0.0), ended - began)
    clock.move("exchange", "wait", float(waited.sum()))
    if clock.log is not None:
        for moment, seconds in zip(exposed.began, waited.tolist(), strict=True):
            clock.log.relabel("exchange", "wait", moment, moment + seconds)
    exposed.clear()
    return table[:, : len(along)]


@dataclass(frozen=True, slots=True)
class OffsetSample:
    """One measurement of the offset between rank 0's clock and this rank's."""

    moment: float
    seconds: float
    error_seconds: float = 0.0
    """Maximum error: half of the round-trip time."""


MAX_DRIFT = 200e-6
"""In seconds per second: more than two intact clocks drift apart."""


class ClockOffset:
    """Seconds to add to this rank's clock to get rank 0's, from repeated measurements.

    The clocks of two machines drift apart by about 20 us per second. Between two measurements the
    offset is interpolated. After the last one it is extrapolated by the drift between the first and
    the last, unless that drift is within the measurement error, which extrapolation would amplify.
    """

    def __init__(self, *samples: OffsetSample) -> None:
        self._samples = list(samples) or [OffsetSample(0.0, 0.0)]

    def add(self, sample: OffsetSample) -> None:
        """Append a measurement; it must be later than all others."""
        self._samples.append(sample)

    def at(self, moment: float) -> float:
        """Return the offset at a time of this rank's clock."""
        samples = self._samples
        if moment <= samples[0].moment:
            return samples[0].seconds
        later = bisect_right(samples, moment, key=lambda sample: sample.moment)
        earlier = samples[later - 1]
        if later == len(samples):
            return earlier.seconds + self._drift() * (moment - earlier.moment)
        return earlier.seconds + _drift_between(earlier, samples[later]) * (moment - earlier.moment)

    def _drift(self) -> float:
        """Return the drift over the longest interval, where measurement errors matter least."""
        first, last = self._samples[0], self._samples[-1]
        if abs(last.seconds - first.seconds) <= first.error_seconds + last.error_seconds:
            return 0.0
        return max(-MAX_DRIFT, min(_drift_between(first, last), MAX_DRIFT))


def _drift_between(first: OffsetSample, second: OffsetSample) -> float:
    return (second.seconds - first.seconds) / (second.moment - first.moment)


def measure_clock_offset(communicator: Communicator, node: int | None = None) -> OffsetSample:
    """Measure the offset by the shortest of several round trips to rank 0. Collective.

    The shortest one is the most symmetric. Ranks on rank 0's `node` share its clock.
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


NOISE_EVERY = 50
"""Steps between measurements with --noise-every auto. A step of any model passes over its gradients
about ten times, and a measurement twice: this keeps it below 1% of the time."""


def noise_meter(config: RunConfig, strategy: Strategy) -> GradientNoise:
    """Return what measures the gradients of a strategy, which has been set up."""
    replica, every = strategy.replica, config.noise_every
    is_alone = replica.communicator.world_size == 1
    reason = strategy.noise_obstacle()
    if every == "never":
        reason = "--noise-every never"
    elif reason is None and is_alone and config.accumulate == 1:
        reason = "one worker without gradient accumulation has no smaller batches to compare with"
    elif reason is None and config.sync_bn:
        reason = "with --sync-bn, the gradient of a worker depends on the samples of the others"
    noise = GradientNoise(
        scaler=replica.scaler,
        reason=reason,
        by_microbatch=is_alone,
        is_recorded=replica.communicator.rank == 0,
    )
    if reason is None:
        noise.every = every if isinstance(every, int) else NOISE_EVERY
    return noise


COMPUTE_PHASES = ("input", "forward", "backward")
"""The phases that depend on the speed of a rank."""


MIN_CLOCK_INTERVAL_SECONDS, MAX_CLOCK_INTERVAL_SECONDS = 5.0, 120.0
"""Between two measurements of the clock offset: short at first, to learn the drift early, then
doubled each time."""


class StepCoordinator:
    """Coordinates one rank with the others after each step."""

    def __init__(self, config: RunConfig, strategy: Strategy, replica: Replica) -> None:
        self.shares = config.share_weights
        """Weights of the ranks' shards of the next batches."""
        self._adapts_shares = config.shares == ("auto",)
        self._replica = replica
        self._strategy = strategy
        self._clock = replica.clock
        self._communicator = replica.communicator
        self._is_alone = replica.communicator.world_size == 1
        self._is_coordinated = strategy.synchronous and not self._is_alone
        self.clock_offset = ClockOffset()
        """Seconds to add to this rank's clock to get rank 0's; 0 if not measured."""
        self._clock_seconds = MIN_CLOCK_INTERVAL_SECONDS
        self._iterations_left = 1

    @property
    def noise(self) -> GradientNoise:
        return self._replica.noise

    def start(self) -> None:
        """Call right before the first step. Collective."""
        if self._is_coordinated:
            sample = measure_clock_offset(self._communicator, self._replica.node)
            self.clock_offset = ClockOffset(sample)
        self._clocks_measured = perf_counter()
        self._clock.enter("other")  # Adds the time so far, so that no step interval includes it.
        self._settled_phases = dict(self._clock.seconds)
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._iterations = 0
        self._seconds = 0.0
        self._samples = 0
        self._compute_seconds_before = self._compute_seconds()

    def _compute_seconds(self) -> float:
        return sum(self._clock.seconds[phase] for phase in COMPUTE_PHASES)

    def after_step(self, seconds: float, samples: int, stop: bool) -> bool:
        """Report a step of this rank; return whether all ranks stop now. Collective."""
        if self._is_alone:
            self._seconds += seconds
            if self._seconds >= SECONDS_BETWEEN:
                self._seconds = 0.0
                self.settle()
            return stop
        if not self._is_coordinated:
            # Asynchronous ranks stop by their next assignment.
            return False
        self._iterations += 1
        self._seconds += seconds
        self._samples += samples
        self._iterations_left -= 1
        return self._iterations_left == 0 and self._coordinate(stop)

    def _coordinate(self, stop: bool) -> bool:
        stats = StepStats(
            stop=stop,
            compute_seconds=self._compute_seconds() - self._compute_seconds_before,
            samples=self._samples,
            seconds_per_iteration=self._seconds / self._iterations,
            # Only rank 0 asks, so that all ranks measure equally often.
            measure_clocks=self._communicator.rank == 0
            and perf_counter() - self._clocks_measured >= self._clock_seconds,
        )
        # Not in a phase of a step: otherwise its phases would not add up to its duration.
        with self._clock.during("other"):
            decision = exchange_stats(self._communicator, stats)
            if decision.measure_clocks:
                self._measure_clocks()
            self.settle()
        self._iterations_left = decision.iterations_to_next
        if self._adapts_shares:
            self.shares = follow(self.shares, decision.speeds)
        self._begin_interval()
        return decision.stop

    def _measure_clocks(self) -> None:
        """Collective."""
        self.clock_offset.add(measure_clock_offset(self._communicator, self._replica.node))
        self._clocks_measured = perf_counter()
        self._clock_seconds = min(2 * self._clock_seconds, MAX_CLOCK_INTERVAL_SECONDS)

    def settle(self) -> None:
        """Attribute waits, and combine measured gradients, since the last call. Collective."""
        noise = self.noise
        if self._is_alone:
            noise.add_table(noise.take()[None])
        elif self._is_coordinated:
            # Created by the strategy's setup, which may follow the creation of this object.
            if (meter := self._strategy.meter) is not None:
                # All ranks must compare the same steps.
                meter.settle()
            table = attribute_waits(
                self._communicator,
                self._clock,
                self._replica.exposed,
                self.clock_offset,
                noise.take(),
            )
            noise.add_table(table)
            self._settled_phases = dict(self._clock.seconds)

    @property
    def settled_phase_seconds(self) -> dict[str, float]:
        """Seconds by phase when waits were last attributed."""
        return self._settled_phases if self._is_coordinated else self._clock.known_seconds


def follow(shares: Sequence[float], speeds: Sequence[float]) -> list[float]:
    """Return shares proportional to speed; a rank without a measured speed keeps its fraction."""
    measured = [number for number, speed in enumerate(speeds) if speed > 0]
    if not measured:
        return list(shares)
    scale = sum(speeds[number] for number in measured) / sum(shares[number] for number in measured)
    return [speed or share * scale for share, speed in zip(shares, speeds, strict=True)]
