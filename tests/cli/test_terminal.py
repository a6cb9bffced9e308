"""Lines that are printed for people."""

from __future__ import annotations

import pytest
from rich.table import Table
from rich.text import Text

from paceline.terminal import open_console, paragraph


def test_table_has_no_trailing_spaces(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "what"):
        table.add_column(heading)
    for name, what in (("a", "x"), ("long name", "y z"), ("b", "")):
        table.add_row(name, Text(what, style="red"))
    open_console().print(table)
    assert capsys.readouterr().out == "name       what\na          x\nlong name  y z\nb\n"


def test_soft_wrapped_line_is_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/a/long/path" * 20
    open_console(max_columns=80).print(f"report      {path}", soft_wrap=True)
    assert capsys.readouterr().out == f"report      {path}\n"


def test_paragraph_is_wrapped_to_the_width(capsys: pytest.CaptureFixture[str]) -> None:
    open_console(width=20).print("one two three four five six seven")
    assert capsys.readouterr().out == "one two three four\nfive six seven\n"


def test_number_is_not_separated_from_its_unit() -> None:
    message = paragraph("it takes 18.07 ms or 25.6 %, and so on", open_console(width=18))
    assert message.splitlines() == ["it takes 18.07 ms", "or 25.6 %, and so", "on"]
    assert paragraph("it takes 18.07 ms", open_console(width=15)) == "it takes\n18.07 ms"
