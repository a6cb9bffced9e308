"""Time of collectives: rounds of messages, each as long as a measured round of that size.

An algorithm on P workers is a sequence of rounds (`rounds_of`). In a round, workers exchange
messages, and the busiest link carries `link_bytes` in one direction. This is the closed form
of a simulation of the messages themselves (tests/support/message_simulation.py).

The time of one round, by bytes, is measured with two workers or a few more (`RoundTimes`): a
measurement of r equal rounds takes r times as long as one of them. It includes what an alpha-beta
model leaves out: protocol handshakes, sums, copies, bursts. For another link, the difference of the
nominal links is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.plan.calibration import CollectiveTiming
from paceline.plan.links import Link

Floats = NDArray[np.float64]

ROUND_TRIPS = 1.0
"""Round trips of a round, if they were not measured: gloo sends once the receiver is ready."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Equal rounds of an algorithm, one after the other."""

    count: int
    link_bytes: float
    """Bytes that the busiest link carries in one direction, in one round."""
    messages: int = 1
    """That the busiest worker receives or sends, in one round."""


def rounds_of(
    operation: str, algorithm: str, workers: int, size_bytes: float
) -> tuple[Rounds, ...]:
    """The rounds of a collective, as comm/algorithms and gloo perform it.

    `size_bytes` is that of the whole tensor, as in `paceline comm`.
    """
    if workers < 2:
        return ()
    peers, chunk = workers - 1, size_bytes / workers
    depth = math.ceil(math.log2(workers))
    if operation == "all_reduce":
        if algorithm in ("ring", "library"):
            return (Rounds(2 * peers, chunk),)
        if algorithm == "root":
            return (Rounds(2, peers * size_bytes, peers),)
        if algorithm == "tree":
            return (Rounds(2 * depth, size_bytes),)
        if algorithm == "halving_doubling":
            halvings = workers.bit_length() - 1
            halves = tuple(Rounds(2, size_bytes / 2**step) for step in range(1, halvings + 1))
            # Ranks beyond a power of two send everything to a partner, and get everything back.
            return (Rounds(2, size_bytes), *halves) if workers != 1 << halvings else halves
    by_operation = {
        "reduce_scatter": Rounds(peers, chunk),
        "all_gather": Rounds(peers, chunk),
        "gather": Rounds(1, peers * chunk, peers),
        "scatter": Rounds(1, peers * chunk, peers),
        "broadcast": Rounds(depth, size_bytes),
        "send_recv": Rounds(1, size_bytes),
    }
    if operation not in by_operation:
        raise ValueError(f"no rounds are known for {operation} by {algorithm}")
    return (by_operation[operation],)


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Time of one collective that has the link to itself."""

    delay_seconds: float
    """Round trips, in which other collectives can use the link."""
    busy_seconds: float
    """Transfer, sums and software, which concurrent collectives share."""
    codec_seconds: float = 0.0
    """Encoding and decoding, which share the worker's cores with its backward pass."""

    @property
    def seconds(self) -> float:
        return self.delay_seconds + self.busy_seconds + self.codec_seconds

    def scaled(self, factor: float) -> CollectiveTime:
        return CollectiveTime(
            self.delay_seconds * factor, self.busy_seconds * factor, self.codec_seconds * factor
        )

    def __add__(self, other: CollectiveTime) -> CollectiveTime:
        return CollectiveTime(
            self.delay_seconds + other.delay_seconds,
            self.busy_seconds + other.busy_seconds,
            self.codec_seconds + other.codec_seconds,
        )


NO_TIME = CollectiveTime(0.0, 0.0)


SMALL_BYTES, SMALL_SECONDS = 2**17, 1e-3
"""Rounds up to this size, which a link transfers in this time, show the latency: they fit in socket
buffers and in the burst of a link."""


class RoundTimes:
    """Seconds of a round by link bytes: at least the latency, and linear for large rounds.

    The line need not start at the latency. A token bucket lets the first bytes pass at once, which
    lowers it; a sum after each transfer raises it.
    """

    def __init__(
        self,
        latency_seconds: float,
        seconds_per_byte: float,
        offset_seconds: float | None = None,
        *,
        call_seconds: float = 0.0,
        message_seconds: float = 0.0,
        round_trip_seconds: float = 0.0,
        round_trips: float = ROUND_TRIPS,
        largest_bytes: float = math.inf,
    ) -> None:
        self.latency_seconds, self.seconds_per_byte = latency_seconds, seconds_per_byte
        self.offset_seconds = latency_seconds if offset_seconds is None else offset_seconds
        self.call_seconds = call_seconds
        """Of a collective, besides its rounds: calls, threads, buffers."""
        self.message_seconds = message_seconds
        """Of each message of a round but the first, at the worker that has the most."""
        self.largest_bytes = largest_bytes
        """Of the measured rounds."""
        self._round_trip_seconds, self._round_trips = round_trip_seconds, round_trips

    @classmethod
    def of(
        cls,
        timing: CollectiveTiming,
        round_trips: float = ROUND_TRIPS,
        random: np.random.Generator | None = None,
        message_seconds: float | None = None,
    ) -> RoundTimes:
        """Fit a measurement; with `random`, a bootstrap sample of it.

        The time of unequal rounds is divided by the number of rounds, and their bytes too. A round
        has the latency of a message, if it is known: the software's part `message_seconds`, and
        the round trips. The rest of the measured latency is the cost of the call.
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
        latency, slope, offset = _fit(np.array(sizes), np.array(seconds), small_bytes)
        round_trip = timing.link.round_trip_seconds if timing.link else 0.0
        of_call = 0.0
        if message_seconds is not None:
            of_call = max(0.0, latency - message_seconds - round_trips * round_trip)
        return cls(
            latency - of_call,
            slope,
            offset - of_call,
            call_seconds=of_call * count,
            message_seconds=MESSAGE_SHARE * (message_seconds or 0.0),
            round_trip_seconds=round_trip,
            round_trips=round_trips,
            largest_bytes=max(sizes),
        )

    @property
    def delay_seconds(self) -> float:
        """The part of each round in which the link is idle."""
        return min(self._round_trips * self._round_trip_seconds, self.latency_seconds)

    def __call__(self, link_bytes: float) -> float:
        line = self.offset_seconds + link_bytes * self.seconds_per_byte
        return max(self.latency_seconds, line)

    def time(self, rounds: Sequence[Rounds]) -> CollectiveTime:
        total = math.fsum(
            each.count * (self(each.link_bytes) + (each.messages - 1) * self.message_seconds)
            for each in rounds
        )
        total += self.call_seconds if rounds else 0.0
        delay = self.delay_seconds * sum(each.count for each in rounds)
        return CollectiveTime(delay, total - delay)

    def on_link(
        self, measured: Link, link: Link, least_seconds_per_byte: float = 0.0
    ) -> RoundTimes:
        """The times on another link: the difference of the nominal links is added.

        `least_seconds_per_byte` is what software takes: no link makes it faster.
        """
        if measured == link:
            return self
        trips = self._round_trips * (link.round_trip_seconds - measured.round_trip_seconds)
        slower = 1 / link.bytes_per_second - 1 / measured.bytes_per_second
        least = max(1 / link.bytes_per_second, least_seconds_per_byte)
        return RoundTimes(
            max(self.latency_seconds + trips, LEAST_LATENCY_SECONDS),
            max(self.seconds_per_byte + slower, least),
            self.offset_seconds + trips,
            call_seconds=self.call_seconds,
            message_seconds=self.message_seconds,
            round_trip_seconds=link.round_trip_seconds,
            round_trips=self._round_trips,
            largest_bytes=self.largest_bytes,
        )

    def scaled(self, latency: float, transfer: float) -> RoundTimes:
        """The times with these factors on all latencies and on the time of each byte."""
        if latency == transfer == 1.0:
            return self
        return RoundTimes(
            self.latency_seconds * latency,
            self.seconds_per_byte * transfer,
            # The line starts where a message of no bytes would end.
            self.offset_seconds + self.latency_seconds * (latency - 1),
            call_seconds=self.call_seconds * latency,
            message_seconds=self.message_seconds * latency,
            round_trip_seconds=self._round_trip_seconds * latency,
            round_trips=self._round_trips,
            largest_bytes=self.largest_bytes,
        )


LEAST_LATENCY_SECONDS = 1e-5
MESSAGE_SHARE = 0.25
"""Cost of one of several messages of a round, relative to a message on its own."""


def _fit(sizes: Floats, seconds: Floats, small_bytes: float) -> tuple[float, float, float]:
    """Latency, seconds per byte and offset of the line."""
    is_small = sizes <= small_bytes
    if is_small.all() or not is_small.any():
        # One kind of rounds shows only a line.
        slope, offset = _robust_line(sizes, seconds)
        return max(offset, 0.0), slope, max(offset, 0.0)
    # The smallest of them, since a slow link also needs time for the bytes of the others.
    smallest = np.argsort(sizes)[: max(1, int(is_small.sum()) // 2)]
    latency = float(np.median(seconds[smallest]))
    if (~is_small).sum() == 1:
        slope = float(max(seconds[~is_small][0] - latency, 0.0) / sizes[~is_small][0])
        return latency, slope, latency
    slope, offset = _robust_line(sizes[~is_small], seconds[~is_small])
    if (~is_small).sum() == 2:
        # Two sizes cannot tell an offset from noise.
        anchored = np.median((seconds[~is_small] - latency) / sizes[~is_small])
        return latency, float(max(anchored, 0.0)), latency
    return latency, slope, offset


def _robust_line(sizes: Floats, seconds: Floats) -> tuple[float, float]:
    """Slope and offset by least squares of relative errors, with little weight on outliers."""
    if len(sizes) == 1:
        return float(seconds[0] / max(sizes[0], 1.0)), 0.0
    weights = 1 / seconds
    slope = offset = 0.0
    for _ in range(5):
        squares = weights**2 / np.sum(weights**2)
        size, second = float(np.dot(squares, sizes)), float(np.dot(squares, seconds))
        centered = squares * (sizes - size)
        slope = float(np.dot(centered, seconds) / np.dot(centered, sizes))
        offset = second - slope * size
        if slope <= 0:
            return float(np.median(seconds / np.maximum(sizes, 1.0))), 0.0
        errors = np.abs(seconds - offset - slope * sizes) / seconds
        scale = max(float(np.median(errors)), 0.01)
        weights = 1 / seconds / np.sqrt(np.maximum(errors / (2 * scale), 1.0))
    return slope, offset


def nominal_round_times(link: Link, overhead_seconds: float = 50e-6) -> RoundTimes:
    """A link that was not measured: one round trip, and the nominal bandwidth."""
    latency = overhead_seconds + link.round_trip_seconds
    return RoundTimes(
        latency, 1 / link.bytes_per_second, round_trip_seconds=link.round_trip_seconds
    )


def measured_round_trips(timings: Sequence[CollectiveTiming]) -> float:
    """Round trips per round, from measurements of one collective on links of different latency."""
    latencies = []
    for timing in timings:
        if timing.link is not None and (line := timing.line()) is not None:
            rounds = rounds_of(timing.operation, timing.algorithm, timing.workers, 1.0)
            count = sum(each.count for each in rounds)
            latencies.append((timing.link.round_trip_seconds, line.latency_seconds / count))
    if len(latencies) < 2:
        return ROUND_TRIPS
    (near, fast), (far, slow) = min(latencies), max(latencies)
    if far - near < 1e-4:
        return ROUND_TRIPS
    return min(max((slow - fast) / (far - near), 0.5), 3.0)
