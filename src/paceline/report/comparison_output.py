"""A comparison in the terminal, within 80 columns, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table as TerminalTable

from paceline.errors import RecordsError
from paceline.report.cells import Cell
from paceline.report.collection import left_out_lines
from paceline.report.comparison import Compared, Row, result_rows, setting_rows, significance
from paceline.report.document import Block, ChapterPage, Document, Section, Table, Text
from paceline.report.html import to_html
from paceline.report.section.outline import outline
from paceline.report.sections import SECTIONS
from paceline.report.verdict import judge
from paceline.terminal import open_console, paragraph

WIDTH = 80
CELLS_IN_A_TABLE = 4
"""As many as fit beside the names of the rows."""
MOST_TESTED = 8
"""Cells in the list of differences; a page has them all."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def print_comparison(compared: Compared) -> None:
    """Cells are called by letters, so that long names break no table."""
    cells = compared.cells
    console = open_console(width=WIDTH)
    letters = [_letter(index) for index in range(len(cells))]
    for letter, cell in zip(letters, cells, strict=True):
        console.print(f"{letter}  {cell.label}", overflow="fold")
    console.print()
    settings, results = setting_rows(cells), result_rows(cells)
    rest = iter(range(len(cells)))
    while block := list(islice(rest, CELLS_IN_A_TABLE)):
        console.print(_table(block, letters, settings, results))
        console.print()
    if len(cells) > 1:
        _print_significance(console, cells, letters)
        console.print(paragraph(judge(cells).headline, console))
    for line in left_out_lines(compared.left_out, "the page that --html writes"):
        console.print(line)


def _letter(index: int) -> str:
    return LETTERS[index] if index < len(LETTERS) else f"{index + 1}"


def _table(
    block: Sequence[int], letters: Sequence[str], settings: Sequence[Row], results: Sequence[Row]
) -> TerminalTable:
    table = TerminalTable(box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    for index in block:
        table.add_column(letters[index], justify="right", overflow="fold")
    for row in settings:
        table.add_row(row.name, *(row.cells[index] for index in block))
    if settings:
        table.add_row()
    for row in results:
        table.add_row(row.name, *(row.cells[index] for index in block))
    return table


def _print_significance(console: Console, cells: Sequence[Cell], letters: Sequence[str]) -> None:
    named = dict(zip((cell.label for cell in cells), letters, strict=True))
    for one in significance(cells[:MOST_TESTED]):
        if one.name.startswith("time per") or one.difference.known:
            console.print(f"A against {named[one.other]}, {one.name}: {one.words()}")


def write_comparison(compared: Compared, page: Path) -> None:
    """The same as one HTML file, with curves and phases of the cells."""
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(to_html(to_document(compared)), encoding="utf-8")
    except OSError as error:
        raise RecordsError(f"cannot write {page}: {error.strerror}") from None


def to_document(compared: Compared) -> Document:
    cells = compared.cells
    verdict = judge(cells)
    columns = ("", *(cell.label for cell in cells))
    sections = [_rows("settings", "What differs in the settings", columns, setting_rows(cells))]
    sections.append(_rows("results", "What came out", columns, result_rows(cells)))
    tests = [(one.name, one.other, one.words()) for one in significance(cells)]
    if tests:
        blocks: list[Block] = [
            Text(
                f"{cells[0].label} against the others, as a share of the other's figure, corrected"
                f" for {len(tests):,} comparisons (Holm):"
                if len(tests) > 1
                else f"{cells[0].label} against the other, as a share of the other's figure:"
            ),
            Table(("figure", "against", "difference"), tests, words=3),
        ]
        sections.append(Section("significance", "What is significant", blocks))
    about = outline("", cells)
    for name in ("curves", "iteration_time", "phases"):
        built = SECTIONS[name].build(about)
        if built:
            sections.append(Section(name, SECTIONS[name].title, built))
    return Document(
        title="Comparison",
        subtitle=" · ".join(cell.label for cell in cells),
        about="",
        headline=verdict.headline,
        points=[(point.subject, point.text) for point in verdict.points],
        next_steps=verdict.next_steps,
        chapters=[
            ChapterPage("comparison", "Comparison", "", "", [s for s in sections if s.blocks])
        ],
        left_out=[(one.name, one.why) for one in compared.left_out],
    )


def _rows(name: str, title: str, columns: Sequence[str], rows: Sequence[Row]) -> Section:
    blocks: list[Block] = []
    if rows:
        blocks.append(Table(columns, [(row.name, *row.cells) for row in rows]))
    return Section(name, title, blocks)
