"""Sizes as users write them and as tables show them."""

from __future__ import annotations

import pytest

from paceline.commbench.spec import doubling, parse_size, parse_sizes, size_text


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", 4), ("1k", 1024), ("37m", 37 * 2**20), ("2G", 2**31), ("4 KiB", 4096), ("1mb", 2**20)],
)
def test_a_letter_is_a_power_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "3", "k", "1.5m", "-1k", "9g", "1t", "nan"])
def test_an_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="a size from 4 to 8g"):
        parse_size(text)


def test_a_list_is_sorted_and_has_each_size_once() -> None:
    assert parse_sizes("1m, 4k,1024k") == (4096, 2**20)


@pytest.mark.parametrize(
    ("last", "sizes"), [(4096, (1024, 2048, 4096)), (5000, (1024, 2048, 4096)), (100, (100,))]
)
def test_default_sizes_double_up_to_the_last(last: int, sizes: tuple[int, ...]) -> None:
    assert doubling(last) == sizes


@pytest.mark.parametrize(
    ("size", "text"), [(1024, "1 KiB"), (37 * 2**20, "37 MiB"), (1020, "1020 B"), (2**30, "1 GiB")]
)
def test_a_size_is_shown_exactly(size: int, text: str) -> None:
    assert size_text(size) == text
