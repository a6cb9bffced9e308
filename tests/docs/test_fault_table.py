"""The table of faults in docs/fault-tolerance.md: every cell is backed by existing tests."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1] / "launch"
PAGE = (TESTS.parents[1] / "docs" / "fault-tolerance.md").read_text()


def test_each_number_of_the_table_leads_to_tests() -> None:
    table, tests = PAGE[PAGE.index("## Faults during training") :].split(
        "Shown by, in tests/launch:"
    )
    used = {int(number) for number in re.findall(r"\((\d+)\)", table)}
    listed = {int(number) for number in re.findall(r"^(\d+)\. ", tests, flags=re.M)}
    assert used == listed == set(range(1, len(listed) + 1))


def test_the_tests_that_it_names_are_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)
    assert named
    missing = [name for file, name in named if f"def {name}(" not in Path(TESTS, file).read_text()]
    assert not missing
