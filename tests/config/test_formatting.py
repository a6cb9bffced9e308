"""Numbers with units."""

import pytest

from paceline import formatting


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.000_999_4, "999 us"),
        (0.000_999_6, "1.00 ms"),
        (0.999_994, "999.99 ms"),
        (0.999_996, "1.00 s"),
        (9.996, "10.0 s"),
        (999.96, "1,000 s"),
        (-0.000_999_6, "-1.00 ms"),
    ],
)
def test_seconds_round_up_to_the_next_unit(value: float, text: str) -> None:
    assert formatting.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(999.4, "999 B"), (999.6, "1.0 kB"), (999_960, "1.0 MB")]
)
def test_sizes_round_up_to_the_next_unit(value: float, text: str) -> None:
    assert formatting.size(value) == text


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (0.00645, 0.00031, "6.45 ± 0.31 ms"),
        (1.5, 0.004, "1.50 ± 0.00 s"),
        (0.5, 2.0, "500.00 ± 2,000.00 ms"),
    ],
)
def test_an_interval_has_the_unit_of_its_mean(mean: float, half: float, text: str) -> None:
    assert formatting.interval(mean, half, formatting.seconds) == text


def test_a_spread_has_mean_interval_min_and_max() -> None:
    values = [0.001, 0.002, 0.003]
    assert formatting.spread(values, formatting.seconds) == "2.00 ms (1.00 to 3.00)"
    with_interval = formatting.spread(values, formatting.seconds, 0.0005)
    assert with_interval == "2.00 ± 0.50 ms (1.00 to 3.00)"
    assert formatting.spread([0.88, 0.88], formatting.number, 0.01) == "0.8800 ± 0.0100"


def test_short_seconds_can_have_a_given_unit() -> None:
    assert formatting.short_seconds(0.00105) == "1.05 ms"
    assert formatting.short_seconds(0.000884, "ms") == "0.88 ms"
    assert formatting.short_seconds(1.2, "ms") == "1,200 ms"
    assert formatting.short_seconds(0.00105, "us") == "1,050 us"
