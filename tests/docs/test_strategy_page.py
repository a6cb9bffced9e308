"""docs/strategies.md covers every strategy and every option."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.config.conversion import option_types
from paceline.strategies import STRATEGIES

PAGE = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text(encoding="utf-8")
OPTIONS = PAGE[PAGE.index("## Options") : PAGE.index("## Compare")]


@pytest.mark.parametrize("name", STRATEGIES.names())
def test_every_strategy_has_a_row(name: str) -> None:
    assert re.search(rf"^\| `{name}` \|", PAGE, flags=re.M)


@pytest.mark.parametrize("name", STRATEGIES.names())
def test_every_option_is_named(name: str) -> None:
    for option in option_types(STRATEGIES.load(name)):
        assert f"`{option}`" in OPTIONS


def test_every_option_on_the_page_exists() -> None:
    known = {
        option for name in STRATEGIES.names() for option in option_types(STRATEGIES.load(name))
    }
    cells = re.findall(r"^\|[^|]+\|([^|]+)\|", OPTIONS, flags=re.M)
    named = {option for cell in cells for option in re.findall(r"`(\w+)`", cell)}
    assert named == known
