"""Latency and bandwidth from times at several sizes."""

from __future__ import annotations

import random

import pytest

from paceline.commbench.fit import Point, fit

LATENCY, RATE = 100e-6, 1e9
SIZES = [2**power for power in range(10, 28, 2)]


def times(size: int, *factors: float) -> list[float]:
    return [(LATENCY + size / RATE) * factor for factor in factors]


def test_times_on_a_line_give_its_latency_and_bandwidth() -> None:
    line = fit([Point(size, times(size, 1.0, 1.0)) for size in SIZES])
    assert line is not None
    assert line.latency_seconds == pytest.approx(LATENCY)
    assert line.bytes_per_second == pytest.approx(RATE)


def test_the_truth_is_within_the_error_bars_of_noisy_times() -> None:
    """Of a hundred fits of times that scatter by 10 %, about 95 must be within two errors."""
    noise = random.Random(1)
    within = 0
    for _ in range(100):
        points = [
            Point(size, times(size, *(noise.gauss(1, 0.1) for _ in range(10)))) for size in SIZES
        ]
        line = fit(points)
        assert line is not None
        assert line.latency_error_seconds is not None
        assert line.bytes_per_second_error is not None
        within += abs(line.latency_seconds - LATENCY) < 2 * line.latency_error_seconds
        assert abs(line.bytes_per_second - RATE) < 5 * line.bytes_per_second_error
    assert within > 85


@pytest.mark.parametrize("sizes", [2, 3])
def test_a_fit_has_errors_only_with_more_than_two_sizes(sizes: int) -> None:
    line = fit([Point(size, times(size, 0.9, 1.0, 1.1)) for size in SIZES[:sizes]])
    assert line is not None
    assert (line.latency_error_seconds is not None) == (sizes > 2)
    assert (line.bytes_per_second_error is not None) == (sizes > 2)


def test_a_size_whose_repeats_differ_counts_for_less() -> None:
    steady = [Point(size, times(size, 1.0, 1.0)) for size in SIZES[:-1]]
    wild = Point(SIZES[-1], times(SIZES[-1], 1.0, 3.0))
    line = fit([*steady, wild])
    assert line is not None
    assert line.bytes_per_second == pytest.approx(RATE, rel=0.05)


def test_a_latency_below_nothing_counts_as_none() -> None:
    line = fit([Point(1000, [1e-6]), Point(2000, [3e-6])])
    assert line is not None
    assert line.latency_seconds == 0
    assert line.bytes_per_second > 0


@pytest.mark.parametrize(
    "points",
    [
        [],
        [Point(1024, [1e-3])],
        [Point(1000, [2.0]), Point(10_000, [1.0])],
        [Point(1000, [1.0, 3.0]), Point(2000, [1.0, 3.0]), Point(3000, [1.1, 3.0])],
    ],
    ids=["none", "one size", "falling", "level"],
)
def test_times_that_say_nothing_give_no_line(points: list[Point]) -> None:
    assert fit(points) is None
