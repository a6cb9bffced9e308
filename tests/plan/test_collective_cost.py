"""Rounds of collectives: equal to simulated messages, to the formulas of comm/, and to data."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.comm.algorithms import ALGORITHMS
from paceline.comm.cost import Network as CostNetwork
from paceline.plan.calibration import CollectiveTiming, SizePoint
from paceline.plan.collective_cost import (
    MESSAGE_SHARE,
    CollectiveTime,
    RoundTimes,
    in_sequence,
    measured_round_trips,
)
from paceline.plan.collective_times import CollectiveMeasurements, CollectiveTimes, Place
from paceline.plan.links import Link
from paceline.plan.message_rounds import Rounds, rounds_of
from tests.support.calibrations import calibration, timing
from tests.support.message_simulation import Network, simulated_seconds

LATENCY, RATE = 1e-3, 1e8
LINEAR = RoundTimes(LATENCY, 1 / RATE)
WORLDS = (2, 3, 4, 5, 7, 8, 13, 16)
NAMES = [entry.name for entry in ALGORITHMS]


@pytest.mark.parametrize("workers", WORLDS)
@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("size_bytes", [1.0, 1e6])
def test_rounds_take_as_long_as_their_messages(
    algorithm: str, workers: int, size_bytes: float
) -> None:
    rounds = rounds_of("all_reduce", algorithm, workers, size_bytes)
    network = Network(LATENCY, RATE)
    simulated = simulated_seconds("all_reduce", algorithm, workers, size_bytes, network)
    assert LINEAR.time(rounds).seconds == pytest.approx(simulated, rel=1e-6)


@pytest.mark.parametrize("workers", [1, *WORLDS, 64, 10_000])
@pytest.mark.parametrize("algorithm", NAMES)
def test_rounds_agree_with_the_cost_of_the_algorithm(algorithm: str, workers: int) -> None:
    cost = ALGORITHMS.load(algorithm)().cost(workers, 1e6, CostNetwork(LATENCY, RATE))
    rounds = rounds_of("all_reduce", algorithm, workers, 1e6)
    assert LINEAR.time(rounds).seconds == pytest.approx(cost.seconds, rel=1e-9)


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "gather"])
@pytest.mark.parametrize("workers", WORLDS)
def test_other_collectives_take_as_long_as_their_messages(operation: str, workers: int) -> None:
    rounds = rounds_of(operation, "library", workers, 1e6)
    simulated = simulated_seconds(operation, "library", workers, 1e6, Network(LATENCY, RATE))
    assert LINEAR.time(rounds).seconds == pytest.approx(simulated, rel=1e-6)


@pytest.mark.parametrize("algorithm", NAMES)
def test_measurements_with_two_workers_predict_more(algorithm: str) -> None:
    """If rounds are linear in their bytes, what two workers measure determines every world."""
    pair = rounds_of("all_reduce", algorithm, 2, 1.0)
    count, moved = pair[0].count, pair[0].count * pair[0].link_bytes
    measured = timing("all_reduce", algorithm, count * LATENCY, RATE / moved)
    times = RoundTimes.of(measured)
    for workers, size_bytes in itertools.product(WORLDS, (2**12, 2**20, 2**29)):
        rounds = rounds_of("all_reduce", algorithm, workers, size_bytes)
        expected = LINEAR.time(rounds).seconds
        # Small rounds take as long as the median of the measured small ones.
        assert times.time(rounds).seconds == pytest.approx(expected, rel=1e-3)


def test_a_slower_link_adds_its_difference() -> None:
    near, far = Link(1e9, 0.0), Link(1e8, 2e-3)
    times = RoundTimes(1e-3, 9e-9).on_link(near, far)
    assert times(1e6) == pytest.approx(1e-3 + 9e-3 + 2e-3 + 1e6 * 8 * (1e-8 - 1e-9))
    assert times.time([Rounds(3, 1e3)]).delay_seconds == pytest.approx(3 * 2e-3)


def test_a_faster_link_is_limited_by_its_own_rate_and_by_software() -> None:
    slow, fast = Link(1e8), Link(1e10)
    times = RoundTimes(1e-4, 80e-9)
    assert times.on_link(slow, fast)(1e6) == pytest.approx(1e-4 + 0.0008)
    assert times.on_link(slow, fast, 1e-8)(1e6) == pytest.approx(1e-4 + 0.01)


BURST = 2**17


def burst_times() -> RoundTimes:
    """Up to 128 KiB pass at once, as a token bucket does it."""
    points = tuple(
        SizePoint(size, (1e-3 + max(0.0, size - BURST) / RATE,) * 3)
        for size in (2**12, 2**16, 2**20, 2**22, 2**24)
    )
    return RoundTimes.of(CollectiveTiming("gloo", "send_recv", "library", 2, 2, None, points))


def test_a_rested_link_transfers_its_burst_at_once() -> None:
    times = burst_times()
    assert times.time([Rounds(1, 2**12)]).seconds == pytest.approx(1e-3)
    assert times.time([Rounds(1, 2**22)]).seconds == pytest.approx(1e-3 + (2**22 - BURST) / RATE)


def test_rounds_that_follow_each_other_have_one_burst_and_what_the_link_recovers() -> None:
    """In the latency of a round, the link recovers 100 kB."""
    times = burst_times()
    for count in (2, 8):
        moved = count * 2**20 - BURST - (count - 1) * 1e-3 * RATE
        found = times.time([Rounds(count, 2**20)]).seconds
        assert found == pytest.approx(count * 1e-3 + moved / RATE, rel=1e-3)
    # Small rounds need no more than what it recovers.
    assert times.time([Rounds(50, 90e3)]).seconds == pytest.approx(50e-3, rel=1e-3)


def test_collectives_share_a_burst_unless_the_link_rests() -> None:
    one = burst_times().time([Rounds(1, 2**20)])
    first, second = in_sequence([one, one])
    assert first.seconds == pytest.approx(one.seconds)
    assert second.seconds == pytest.approx(1e-3 + 2**20 / RATE - 1e-3)
    _, rested = in_sequence([one, one], ready=[0.0, 1.0])
    assert rested.seconds == pytest.approx(one.seconds)


def test_the_link_rests_once_while_a_codec_encodes() -> None:
    """It recovers before the first of two rounds, but not between them."""
    time = CollectiveTime(
        0.0, 0.0, codec_seconds=10.0, transfer_seconds=2.0, burst_seconds=0.5, rounds=2
    )
    assert time.seconds == pytest.approx(10.0 + 2.0 - 0.5)


def test_each_direction_of_a_link_has_its_burst() -> None:
    """The root receives, then sends: the other direction rests meanwhile."""
    times = RoundTimes(1e-3, 1 / RATE, burst_seconds=BURST / RATE)
    both = times.time(rounds_of("all_reduce", "root", 2, 2**20))
    assert both.seconds == pytest.approx(2 * (1e-3 + (2**20 - BURST) / RATE))


def test_what_messages_do_not_explain_is_the_cost_of_the_call() -> None:
    """Two rounds take 5 ms: 1 ms of software and 1 ms of round trip each, and 1 ms for the call."""
    measured = timing("all_reduce", "ring", 5e-3, RATE, link=Link(1e9, 1e-3))
    times = RoundTimes.of(measured, round_trips=1.0, message_seconds=1e-3)
    assert times.call_seconds == pytest.approx(1e-3, rel=1e-3)
    assert times.time(rounds_of("all_reduce", "ring", 2, 64)).seconds == pytest.approx(
        5e-3, rel=1e-3
    )
    assert times.time(rounds_of("all_reduce", "ring", 4, 64)).seconds == pytest.approx(
        1e-3 + 6 * 2e-3, rel=1e-3
    )
    large = times.time(rounds_of("all_reduce", "ring", 2, 2**24)).seconds
    assert large == pytest.approx(5e-3 + 2**24 / RATE, rel=1e-3)
    # The messages of all peers arrive at the root, one after the other.
    root = RoundTimes.of(timing("all_reduce", "root", 2e-3, RATE), message_seconds=1e-3)
    few, many = (root.time(rounds_of("all_reduce", "root", each, 1)).seconds for each in (2, 10))
    assert many - few == pytest.approx(2 * 8 * MESSAGE_SHARE * 1e-3, rel=1e-3)


def test_rounds_of_gloos_reduce_scatter_are_those_of_a_ring_of_messages() -> None:
    """comm/torch_distributed.py replaces that of gloo by a ring, whose rounds take 0.4 ms here."""
    link = Link(1e9)
    timings = (
        timing("send_recv", "library", 0.1e-3, RATE, link=link),
        timing("all_reduce", "ring", 2 * 0.4e-3, RATE, link=link),
        timing("reduce_scatter", "library", 0.6e-3, RATE, link=link),
        timing("all_gather", "library", 0.6e-3, RATE, link=link),
    )
    place = Place("gloo", True, link)
    times = CollectiveTimes(CollectiveMeasurements(calibration(collectives=timings)))
    for operation, of_round in (("reduce_scatter", 0.4e-3), ("all_gather", 0.1e-3)):
        rounds = times.rounds(operation, "library", place)
        assert rounds.call_seconds == pytest.approx(0.6e-3 - of_round, rel=1e-3)
        eight = rounds.time(rounds_of(operation, "library", 8, 64)).seconds
        assert eight == pytest.approx(0.6e-3 + 6 * of_round, rel=1e-2)


def test_calls_of_more_workers_of_a_host_take_as_long_as_their_rounds_say() -> None:
    """Calls of two workers take 0.5 ms per round, those of eight 1/14 ms."""

    def library(workers: int, call: float) -> CollectiveTiming:
        rounds = 2 * (workers - 1)
        points = tuple(
            SizePoint(size, (call + rounds * (0.1e-3 + size / workers / RATE),) * 3)
            for size in (64, 2**10, 2**20, 2**24)
        )
        return CollectiveTiming("gloo", "all_reduce", "library", workers, 1, None, points)

    timings = (
        timing("send_recv", "library", 0.1e-3, RATE, link=None),
        library(2, 1e-3),
        library(8, 1e-3),
    )
    times = CollectiveTimes(CollectiveMeasurements(calibration(collectives=timings)))
    for workers, per_round in ((2, 1 / 2), (5, (1 / 2 + 1 / 14) / 2), (8, 1 / 14)):
        rounds = times.rounds("all_reduce", "library", Place("gloo", False, None), workers)
        assert rounds.call_seconds == pytest.approx(2 * (workers - 1) * per_round * 1e-3, rel=0.01)


@pytest.mark.parametrize(("backend", "call"), [("gloo", 0.0), ("nccl", 0.8e-3)])
def test_only_two_workers_share_a_connection_of_gloo(backend: str, call: float) -> None:
    timings = [
        timing("send_recv", "library", 0.1e-3, RATE, backend=backend),
        timing("all_reduce", "library", 1e-3, RATE, backend=backend),
    ]
    times = CollectiveTimes(CollectiveMeasurements(calibration(collectives=timings)))
    place = Place(backend, True, Link(1e9))
    seconds = [times.rounds("all_reduce", "library", place, each).call_seconds for each in (2, 4)]
    assert seconds == pytest.approx([0.8e-3, call], rel=0.01)


@pytest.mark.parametrize("link", [None, Link(1e8)])
@pytest.mark.parametrize(
    # Milliseconds of small sizes, and of sizes of which the last is large.
    "milliseconds",
    [(34, 43, 30), (34, 34.0001, 34.0002), (30, 34, 30, 29)],
)
def test_sizes_that_take_equally_long_show_a_latency_and_no_bandwidth(
    link: Link | None, milliseconds: tuple[float, ...]
) -> None:
    """A byte takes as long as in messages, or as the link says."""
    hosts = 1 if link is None else 2
    points = tuple(
        SizePoint(size, (each / 1e3,) * 3)
        for size, each in zip((256, 2**12, 2**14, 2**22), milliseconds, strict=False)
    )
    noisy = CollectiveTiming("gloo", "all_reduce", "ring", 2, hosts, link, points)
    messages = timing("send_recv", "library", 0.1e-3, RATE, link=link)
    place = Place("gloo", link is not None, link)

    def times(*timings: CollectiveTiming) -> RoundTimes:
        known = CollectiveMeasurements(calibration(collectives=timings))
        return CollectiveTimes(known).rounds("all_reduce", "ring", place)

    found = times(noisy, messages)
    assert found.latency_seconds == pytest.approx(17e-3, rel=0.15)
    assert found.seconds_per_byte == pytest.approx(1 / RATE if link is None else 8e-8, rel=0.01)
    if link is None and milliseconds[-1] <= milliseconds[0]:
        # Without messages, the largest size bounds it.
        bound = 1e-3 * max(milliseconds) / points[-1].size_bytes
        assert times(noisy).seconds_per_byte == pytest.approx(bound)


def test_one_disturbed_size_hardly_changes_the_line() -> None:
    def points(disturbed: float) -> tuple[SizePoint, ...]:
        sizes = [2**12, 2**20, 2**21, 2**22, 2**23, 2**24]
        return tuple(
            SizePoint(size, ((2e-3 + size / RATE) * (disturbed if size == 2**22 else 1.0),) * 3)
            for size in sizes
        )

    plain, noisy = (
        RoundTimes.of(CollectiveTiming("gloo", "all_reduce", "ring", 2, 2, None, points(factor)))
        for factor in (1.0, 1.8)
    )
    assert noisy(2**23) == pytest.approx(plain(2**23), rel=0.06)


def test_bootstrap_samples_vary_with_the_measurements() -> None:
    spread = timing("all_reduce", "ring", 1e-3, 1e8)
    points = tuple(
        type(point)(point.size_bytes, tuple(point.seconds[0] * f for f in (0.9, 1.0, 1.1, 1.3)))
        for point in spread.points
    )
    noisy = type(spread)("gloo", "all_reduce", "ring", 2, 2, spread.link, points)
    random = np.random.default_rng(1)
    values = {RoundTimes.of(noisy, 1.0, random)(1e6) for _ in range(20)}
    assert len(values) > 3
    assert {RoundTimes.of(spread, 1.0, random)(1e6) for _ in range(3)} == {
        RoundTimes.of(spread)(1e6)
    }


def test_round_trips_are_measured_by_links_of_different_latency() -> None:
    near = timing("all_reduce", "ring", 1e-3, 1e8, link=Link(1e9))
    far = timing("all_reduce", "ring", 1e-3 + 2 * 1.5e-3, 1e8, link=Link(1e9, 1e-3))
    assert measured_round_trips([near, far]) == pytest.approx(1.5, rel=1e-3)
    assert measured_round_trips([near]) == 1.0


def test_the_latency_of_a_slow_link_does_not_include_its_transfers() -> None:
    link, latency = Link(1e8), 0.2e-3
    points = tuple(
        SizePoint(size, (2 * (latency + size / 2 / link.bytes_per_second),) * 5)
        for size in (2**step for step in range(10, 25))
    )
    timing = CollectiveTiming("gloo", "all_reduce", "ring", 2, 2, link, points)
    assert RoundTimes.of(timing).latency_seconds == pytest.approx(latency, rel=0.35)
