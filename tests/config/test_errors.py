"""How error messages echo text that a user or another process wrote."""

from __future__ import annotations

import pytest

from paceline.errors import (
    LONGEST_LINE,
    LONGEST_VALUE,
    MOST_LINES,
    ConfigError,
    few_lines,
    one_line,
    shown,
)

ODD = ["\x00", "\U000e0001", "\n", "'\"\\"]


@pytest.mark.parametrize("letter", ODD)
@pytest.mark.parametrize("count", [1, 30, 80, 2000, 100_000])
def test_a_value_is_short_after_it_was_escaped(letter: str, count: int) -> None:
    text = shown(letter * count)
    assert text.isprintable()
    assert len(text) <= LONGEST_VALUE + len("''")


def test_a_short_value_is_shown_whole() -> None:
    assert shown("a" * LONGEST_VALUE) == f"'{'a' * LONGEST_VALUE}'"
    assert shown("a" * (LONGEST_VALUE + 1)).endswith("... (81 characters)")


def test_the_text_of_an_object_is_escaped() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "two\nlines"

    assert shown(Odd()) == "two\\nlines"


@pytest.mark.parametrize("letter", ODD)
def test_a_line_is_bounded_after_it_was_escaped(letter: str) -> None:
    text = one_line(f"begin {letter * 1500}{letter * 100_000} end")
    assert text.isprintable()
    assert len(text) <= LONGEST_LINE
    assert text.startswith("begin ")
    assert text.endswith(" end")


def test_a_message_has_a_bounded_number_of_lines() -> None:
    assert few_lines("one\n\ntwo\x1b[2J") == "one\ntwo\\x1b[2J"
    lines = few_lines("line\n" * 500_000).splitlines()
    assert len(lines) == MOST_LINES
    assert lines[-1] == "... and 499,981 more lines"


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_error_without_a_text_still_says_what_happened(text: str) -> None:
    assert str(ConfigError.from_text(text)).startswith("the configuration was rejected")
