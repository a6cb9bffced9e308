"""Names of sections: those that studies ask for exist, and the docs say what each shows."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from paceline.report.sections import VERDICT, section_names, select, unknown
from paceline.study.study_file import SECTION_NAMES

ROOT = Path(__file__).parents[2]


def test_the_docs_have_a_line_for_each_section() -> None:
    page = (ROOT / "docs" / "reading-a-report.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, flags=re.M) == [VERDICT, *section_names()]


def test_a_study_may_name_just_the_sections_that_there_are() -> None:
    assert (VERDICT, *section_names()) == SECTION_NAMES


def test_sections_that_the_catalogue_asks_for_exist() -> None:
    catalogue = resources.files("paceline.study") / "catalogue"
    files = [file for file in catalogue.iterdir() if file.name.endswith(".yaml")]
    lists = [
        names.split(",")
        for file in files
        for names in re.findall(r"^\s*report: \[(.*?)\]", file.read_text(), flags=re.M | re.S)
    ]
    assert lists
    for names in lists:
        assert unknown([name.strip() for name in names]) == []


def test_what_is_asked_for_comes_in_that_order_after_what_was_run() -> None:
    asked = select(["traffic", "curves", "traffic"], is_alone=True)
    assert asked == ["overview", "traffic", "curves", "configuration"]
    assert select([], is_alone=True) == section_names()
