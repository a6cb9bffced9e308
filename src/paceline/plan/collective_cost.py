"""Time of collectives: rounds of messages, each as long as a measured round of that size.

`rounds_of` (message_rounds.py) is the closed form of a simulation of the messages themselves
(tests/support/message_simulation.py).

The time of one round, by bytes, is measured with two workers or a few more (`RoundTimes`): a
measurement of r equal rounds takes r times as long as one of them. It includes what an alpha-beta
model leaves out: protocol handshakes, sums, copies, bursts. For another link, the difference of the
nominal links is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from paceline.plan.calibration import CollectiveTiming
from paceline.plan.links import Link
from paceline.plan.message_rounds import Rounds, round_count, rounds_of

Floats = NDArray[np.float64]

ROUND_TRIPS = 1.0
"""Round trips of a round, if they were not measured: gloo sends once the receiver is ready."""
ROOT_ROUND_TRIPS = 0.5
"""Of all-reduce by root: who waits for the answer to its message is ready to receive it."""


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Time of one collective that has the link to itself, and in which its burst is available."""

    delay_seconds: float
    """Round trips, in which other collectives can use the link."""
    software_seconds: float
    """Calls, threads and copies, which concurrent collectives share."""
    codec_seconds: float = 0.0
    """Encoding and decoding, which share the worker's cores with its backward pass."""
    transfer_seconds: float = 0.0
    """All bytes at the rate of the link, without bursts."""
    link_seconds: float = 0.0
    """The part of `transfer_seconds` that the nominal link needs: no software makes it shorter."""
    burst_seconds: float = 0.0
    """What a rested link transfers at once, at its rate."""
    rounds: int = 1
    alternates: bool = False
    """Whether rounds take turns in the directions of the busiest link, each with its own burst."""

    @property
    def busy_seconds(self) -> float:
        """What concurrent collectives share."""
        return self.software_seconds + _Bursts().exposed_seconds(self)

    @property
    def idle_seconds(self) -> float:
        """Of the link."""
        return self.delay_seconds + self.software_seconds + self.codec_seconds

    @property
    def seconds(self) -> float:
        return self.idle_seconds + _Bursts().exposed_seconds(self)

    def scaled(self, factor: float, software_factor: float = 1.0) -> CollectiveTime:
        """All times by `factor`, and what is not due to the link by `software_factor` too."""
        slower = self.transfer_seconds - self.link_seconds
        return replace(
            self,
            delay_seconds=self.delay_seconds * factor,
            software_seconds=self.software_seconds * factor * software_factor,
            codec_seconds=self.codec_seconds * factor,
            transfer_seconds=(self.link_seconds + slower * software_factor) * factor,
            link_seconds=self.link_seconds * factor,
            burst_seconds=self.burst_seconds * factor,
        )

    def with_software(self, other: CollectiveTime, share: float) -> CollectiveTime:
        """This time, and a share of what is not due to the link in another, or less if negative."""
        slower = other.transfer_seconds - other.link_seconds
        return replace(
            self,
            software_seconds=max(0.0, self.software_seconds + share * other.software_seconds),
            transfer_seconds=max(self.link_seconds, self.transfer_seconds + share * slower),
        )

    def __add__(self, other: CollectiveTime) -> CollectiveTime:
        """One after the other."""
        return CollectiveTime(
            self.delay_seconds + other.delay_seconds,
            self.software_seconds + other.software_seconds,
            self.codec_seconds + other.codec_seconds,
            self.transfer_seconds + other.transfer_seconds,
            self.link_seconds + other.link_seconds,
            max(self.burst_seconds, other.burst_seconds),
            self.rounds + other.rounds,
            self.alternates or other.alternates,
        )


NO_TIME = CollectiveTime(0.0, 0.0, rounds=0)


class _Bursts:
    """Token buckets of both directions of a link: a rested link transfers its burst at once.

    Such a bucket limits the rate of emulated links and of many rented machines.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._since = [-math.inf, -math.inf]
        """When each direction had no tokens, in seconds of transfer; the past fills the bucket."""

    def wait_until(self, seconds: float) -> None:
        self._now = max(self._now, seconds)

    def exposed_seconds(self, time: CollectiveTime) -> float:
        """Transfer time of the next collective that no burst hides."""
        rounds = max(time.rounds, 1)
        idle = (time.delay_seconds + time.software_seconds) / rounds
        transfer = time.transfer_seconds / rounds
        # A codec encodes once, before the first round.
        self._now += time.codec_seconds
        if not time.alternates:
            saved = (rounds - 1) * min(idle, time.burst_seconds)
            needed = max(time.transfer_seconds - saved, transfer)
            return self._transfer((0, 1), rounds * idle, needed, time.burst_seconds)
        return math.fsum(
            self._transfer((number % 2,), idle, transfer, time.burst_seconds)
            for number in range(rounds)
        )

    def _transfer(
        self, directions: Sequence[int], idle: float, needed: float, burst: float
    ) -> float:
        self._now += idle
        tokens = min(burst, *(self._now - self._since[each] for each in directions))
        exposed = max(0.0, needed - tokens)
        self._now += exposed
        for each in directions:
            self._since[each] = self._now - max(0.0, tokens - needed)
        return exposed


def in_sequence(
    times: Sequence[CollectiveTime], ready: Iterable[float] = ()
) -> list[CollectiveTime]:
    """Collectives that follow each other, with what the bursts of the link leave of each.

    None starts before its time in `ready`.
    """
    bursts = _Bursts()
    found = []
    for time, when in zip(times, chain(ready, repeat(0.0)), strict=False):
        bursts.wait_until(when)
        exposed = bursts.exposed_seconds(time)
        found.append(replace(time, transfer_seconds=exposed, link_seconds=0.0, burst_seconds=0.0))
    return found


SMALL_BYTES, SMALL_SECONDS = 2**17, 1e-3
"""Rounds up to this size, which a link transfers in this time, show the latency: they fit in socket
buffers and in the burst of a link."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of a round by link bytes: a latency, and a time per byte.

    The burst of a link is transferred at once, but only once by rounds that follow each other.
    """

    latency_seconds: float
    seconds_per_byte: float
    link_seconds_per_byte: float = 0.0
    """Of the nominal link; 0 within a host."""
    burst_seconds: float = 0.0
    """What the rested link transfers at once, at its rate."""
    call_seconds: float = 0.0
    """Of a collective, besides its rounds: calls, threads, buffers."""
    message_seconds: float = 0.0
    """Of each message of a round but the first, at the worker that has the most."""
    round_trip_seconds: float = 0.0
    """Of the nominal link."""
    round_trips: float = ROUND_TRIPS
    """Of a round."""

    @classmethod
    def of(
        cls,
        timing: CollectiveTiming,
        round_trips: float = ROUND_TRIPS,
        random: np.random.Generator | None = None,
        message_seconds: float | None = None,
        has_call: bool = True,
        least_seconds_per_byte: float = 0.0,
    ) -> RoundTimes:
        """Fit a measurement; with `random`, a bootstrap sample of it.

        The time of unequal rounds is divided by the number of rounds, and their bytes too. A round
        has the latency of a message, if it is known: the software's part `message_seconds`, and
        the round trips. The rest of the measured latency is the cost of the call, unless an
        algorithm without `has_call` has that cost in each round. Sizes that are all small, or take
        equally long, do not show how long a byte takes: at least as long as the nominal link and
        `least_seconds_per_byte` say.
        """
        sizes, seconds = [], []
        for point in timing.points:
            rounds = rounds_of(timing.operation, timing.algorithm, timing.workers, point.size_bytes)
            samples = np.asarray(point.seconds)
            if random is not None:
                samples = random.choice(samples, len(samples))
            count = sum(each.count for each in rounds)
            sizes.append(sum(each.count * each.link_bytes for each in rounds) / count)
            seconds.append(float(np.median(samples)) / count)
        rate = timing.link.bytes_per_second if timing.link else math.inf
        small_bytes = min(SMALL_BYTES, rate * SMALL_SECONDS)
        latency, slope, burst = _fit(np.array(sizes), np.array(seconds), small_bytes)
        if slope == 0 or max(sizes) <= small_bytes:
            # Without a message and a link to compare with, the largest size is an upper bound.
            least = max(least_seconds_per_byte, 1 / rate)
            slope = max(slope, least) or max(seconds) / max(sizes)
        round_trip = timing.link.round_trip_seconds if timing.link else 0.0
        of_call = 0.0
        if has_call and message_seconds is not None:
            of_call = max(0.0, latency - message_seconds - round_trips * round_trip)
        if not rounds[0].alternates:
            # While a round waits, the link recovers what the next one transfers at once.
            burst = max(0.0, count * burst - (count - 1) * min(latency, burst))
        return cls(
            latency - of_call,
            slope,
            link_seconds_per_byte=min(1 / rate, slope),
            burst_seconds=burst,
            call_seconds=of_call * count,
            message_seconds=MESSAGE_SHARE * (message_seconds or 0.0),
            round_trip_seconds=round_trip,
            round_trips=round_trips,
        )

    @property
    def delay_seconds(self) -> float:
        """The part of each round in which the link is idle."""
        return min(self.round_trips * self.round_trip_seconds, self.latency_seconds)

    def __call__(self, link_bytes: float) -> float:
        """Of one of many rounds, without bursts and calls."""
        return self.latency_seconds + link_bytes * self.seconds_per_byte

    def time(self, rounds: Sequence[Rounds]) -> CollectiveTime:
        if not rounds:
            return NO_TIME
        count = sum(each.count for each in rounds)
        messages = sum(each.count * (each.messages - 1) for each in rounds)
        moved = math.fsum(each.count * each.link_bytes for each in rounds)
        delay = self.delay_seconds * count
        software = self.latency_seconds * count - delay + messages * self.message_seconds
        return CollectiveTime(
            delay,
            software + self.call_seconds,
            transfer_seconds=moved * self.seconds_per_byte,
            link_seconds=moved * self.link_seconds_per_byte,
            burst_seconds=self.burst_seconds,
            rounds=count,
            alternates=rounds[0].alternates,
        )

    def on_link(
        self, measured: Link, link: Link, least_seconds_per_byte: float = 0.0
    ) -> RoundTimes:
        """The times on another link: the difference of the nominal links is added.

        `least_seconds_per_byte` is what software takes: no link makes it faster. Whether the other
        link has bursts is not known.
        """
        if measured == link:
            return self
        trips = self.round_trips * (link.round_trip_seconds - measured.round_trip_seconds)
        slower = 1 / link.bytes_per_second - 1 / measured.bytes_per_second
        least = max(1 / link.bytes_per_second, least_seconds_per_byte)
        return replace(
            self,
            latency_seconds=max(self.latency_seconds + trips, LEAST_LATENCY_SECONDS),
            seconds_per_byte=max(self.seconds_per_byte + slower, least),
            link_seconds_per_byte=1 / link.bytes_per_second,
            burst_seconds=0.0,
            round_trip_seconds=link.round_trip_seconds,
        )

    def in_larger_cluster(self, one_way: RoundTimes, has_call: bool) -> RoundTimes:
        """These times without what two workers lose because they share a connection.

        The bandwidth and the burst are those of one-way messages, if these are faster.
        """
        is_faster = one_way.seconds_per_byte < self.seconds_per_byte
        fastest = one_way if is_faster else self
        return replace(
            self,
            seconds_per_byte=fastest.seconds_per_byte,
            link_seconds_per_byte=min(self.link_seconds_per_byte, fastest.seconds_per_byte),
            burst_seconds=fastest.burst_seconds,
            call_seconds=self.call_seconds if has_call else 0.0,
        )

    def towards(self, other: RoundTimes, share: float) -> RoundTimes:
        """The times between these and others of the same place: `share` of the way."""

        def between(name: str) -> float:
            first, second = getattr(self, name), getattr(other, name)
            return float(first + share * (second - first))

        return replace(self, **{name: between(name) for name in TIMES})

    def with_call(self, factor: float) -> RoundTimes:
        """The times with this factor on the cost of the call."""
        return replace(self, call_seconds=self.call_seconds * factor)

    def scaled(self, latency: float, transfer: float) -> RoundTimes:
        """The times with these factors on all latencies and on the time of each byte."""
        return replace(
            self,
            latency_seconds=self.latency_seconds * latency,
            seconds_per_byte=self.seconds_per_byte * transfer,
            link_seconds_per_byte=self.link_seconds_per_byte * transfer,
            burst_seconds=self.burst_seconds * transfer,
            call_seconds=self.call_seconds * latency,
            message_seconds=self.message_seconds * latency,
            round_trip_seconds=self.round_trip_seconds * latency,
        )


TIMES = (
    "latency_seconds", "seconds_per_byte", "burst_seconds", "call_seconds", "message_seconds",
)  # fmt: skip
"""Of RoundTimes, besides those of the nominal link."""
LEAST_LATENCY_SECONDS = 1e-5
MESSAGE_SHARE = 0.25
"""Cost of one of several messages of a round, relative to a message on its own."""


def _fit(sizes: Floats, seconds: Floats, small_bytes: float) -> tuple[float, float, float]:
    """Latency, seconds per byte, and seconds that a burst saves."""
    is_small = sizes <= small_bytes
    if is_small.all() or not is_small.any():
        # One kind of rounds shows only a line.
        line = _robust_line(sizes, seconds)
        if line is None and is_small.all():
            return float(np.median(seconds)), 0.0, 0.0
        slope, offset = line or _proportional(sizes, seconds)
        return max(offset, 0.0), slope, 0.0
    # The smallest of them, since a slow link also needs time for the bytes of the others.
    smallest = np.argsort(sizes)[: max(1, int(is_small.sum()) // 2)]
    latency = float(np.median(seconds[smallest]))
    large, seconds = sizes[~is_small], seconds[~is_small]
    slope, offset = _robust_line(large, seconds) or _proportional(large, seconds)
    if len(large) > 2 and offset < latency:
        return latency, slope, latency - offset
    # Two sizes cannot tell a burst from noise, and nothing but a burst lowers the line.
    weights = large / large.sum()
    anchored = float(np.dot(weights, np.maximum(seconds - latency, 0.0) / large))
    return latency, anchored, 0.0


def _proportional(sizes: Floats, seconds: Floats) -> tuple[float, float]:
    """Slope and offset of a line through the origin."""
    return float(np.median(seconds / np.maximum(sizes, 1.0))), 0.0


def _robust_line(sizes: Floats, seconds: Floats) -> tuple[float, float] | None:
    """Slope and offset by least squares of relative errors, with little weight on outliers.

    None if larger sizes do not take longer.
    """
    if len(sizes) == 1:
        return None
    weights = 1 / seconds
    slope = offset = 0.0
    for _ in range(5):
        squares = weights**2 / np.sum(weights**2)
        size, second = float(np.dot(squares, sizes)), float(np.dot(squares, seconds))
        centered = squares * (sizes - size)
        slope = float(np.dot(centered, seconds) / np.dot(centered, sizes))
        offset = second - slope * size
        if slope <= 0:
            return None
        errors = np.abs(seconds - offset - slope * sizes) / seconds
        scale = max(float(np.median(errors)), 0.01)
        weights = 1 / seconds / np.sqrt(np.maximum(errors / (2 * scale), 1.0))
    return slope, offset


def nominal_round_times(link: Link, overhead_seconds: float = 50e-6) -> RoundTimes:
    """A link that was not measured: one round trip, and the nominal bandwidth."""
    per_byte = 1 / link.bytes_per_second
    return RoundTimes(
        overhead_seconds + link.round_trip_seconds,
        per_byte,
        link_seconds_per_byte=per_byte,
        round_trip_seconds=link.round_trip_seconds,
    )


def measured_round_trips(timings: Sequence[CollectiveTiming]) -> float:
    """Round trips per round, from measurements of one collective on links of different latency."""
    is_root = any(timing.algorithm == "root" for timing in timings)
    unmeasured = ROOT_ROUND_TRIPS if is_root else ROUND_TRIPS
    latencies = []
    for timing in timings:
        if timing.link is not None and (line := timing.line()) is not None:
            count = round_count(timing.operation, timing.algorithm, timing.workers)
            latencies.append((timing.link.round_trip_seconds, line.latency_seconds / count))
    if len(latencies) < 2:
        return unmeasured
    (near, fast), (far, slow) = min(latencies), max(latencies)
    if far - near < 1e-4:
        return unmeasured
    return min(max((slow - fast) / (far - near), 0.5), 3.0)
