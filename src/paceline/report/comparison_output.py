"""A comparison in the terminal, within 80 columns, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table as TerminalTable

from paceline.analysis.collection import left_out_lines
from paceline.analysis.run_group import RunGroup
from paceline.analysis.verdict import make_verdict
from paceline.errors import RecordsError
from paceline.report.charts.svg import standalone
from paceline.report.comparison import Compared, Row, result_rows, setting_rows, significance
from paceline.report.document import (
    Block,
    BulletList,
    ChapterPage,
    Document,
    Section,
    Table,
    Text,
    slug,
)
from paceline.report.html import to_html
from paceline.report.markdown import to_markdown
from paceline.report.sections import SECTIONS
from paceline.report.sections.outline import outline
from paceline.report.sections.phases import first_note
from paceline.report.study_comparison import (
    FigureTable,
    StudyPair,
    differences,
    figure_tables,
    headline,
    notes,
    unmatched,
)
from paceline.report.wording import findings, interval_note, next_steps
from paceline.report.wording import headline as verdict_headline
from paceline.terminal import open_console, paragraph

WIDTH = 80
CELLS_IN_A_TABLE = 4
"""As many as fit beside the names of the rows."""
NAME_WIDTH = 16
"""At least, for names in a table: the values beside them are folded first."""
MOST_TESTED = 8
"""Cells in the list of differences; a page has them all."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def print_comparison(compared: Compared) -> None:
    """Studies cell by cell; other cells side by side, called by letters."""
    cells = compared.cells
    console = open_console(width=WIDTH)
    if compared.pairs:
        _print_pairs(console, compared.pairs)
        _print_left_out(console, compared)
        return
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
        console.print(paragraph(verdict_headline(make_verdict(cells)), console))
    _print_left_out(console, compared)


def _print_left_out(console: Console, compared: Compared) -> None:
    for line in left_out_lines(compared.left_out, "the page that --html writes"):
        console.print(line)


def _print_pairs(console: Console, pairs: Sequence[StudyPair]) -> None:
    """A letter for each study stands at the head of its column."""
    names = [pairs[0].first, *(pair.other for pair in pairs)]
    for number, name in enumerate(names):
        console.print(f"{_letter(number)}  {name}", overflow="fold")
    for number, pair in enumerate(pairs, 1):
        letter = _letter(number)
        for table in figure_tables(pair):
            console.print(f"\n{table.title}")
            console.print(_pair_table(table, letter))
        console.print()
        for text in (headline(pair), *(notes(pair) if pair.cells else ())):
            console.print(paragraph(text, console))
        for lead, text in (*differences(pair), *unmatched(pair)):
            console.print(paragraph(f"{lead} {text}", console))


def _pair_table(table: FigureTable, letter: str) -> TerminalTable:
    shown = TerminalTable(box=None, pad_edge=False)
    shown.add_column("configuration", overflow="fold", min_width=NAME_WIDTH)
    for heading in ("A", letter):
        shown.add_column(heading, justify="right", overflow="fold")
    for heading in (f"{letter}/A", "corrected\ninterval", "significance"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in table.rows:
        shown.add_row(row.name, row.first, row.other, row.ratio, row.interval, row.significance)
    return shown


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


def _print_significance(
    console: Console, cells: Sequence[RunGroup], letters: Sequence[str]
) -> None:
    """All are tested together, as on the page, however many are printed."""
    named = dict(zip((cell.label for cell in cells[:MOST_TESTED]), letters, strict=False))
    tests = significance(cells)
    for one in tests:
        is_told = one.name.startswith("time per") or one.difference.has_interval
        if is_told and one.other in named:
            console.print(f"A against {named[one.other]}, {one.name}: {one.words()}")
    if len(cells) > MOST_TESTED:
        console.print(f"{len(cells) - MOST_TESTED} more on the page that --html writes")
    if note := interval_note([one.difference for one in tests]):
        console.print(paragraph(note, console))


def write_comparison(compared: Compared, page: Path) -> None:
    """The same as one HTML file, with curves and phases of the cells."""
    _write(page, to_html(to_document(compared)))


def write_markdown(compared: Compared, page: Path) -> None:
    """The same as Markdown, with its figures in a folder beside it."""
    document = to_document(compared)
    folder = f"{slug(page.stem)}-figures"
    _write(page, to_markdown(document, folder))
    for figure in document.figures():
        _write(page.parent / folder / f"{figure.name}.svg", standalone(figure.svg))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise RecordsError(f"cannot write {path}: {error.strerror}") from None


def to_document(compared: Compared) -> Document:
    return _of_pairs(compared) if compared.pairs else _of_cells(compared)


def _of_pairs(compared: Compared) -> Document:
    pairs = compared.pairs
    left_out = [(one.name, one.why) for one in compared.left_out]
    chapters = [_pair_page(f"pair-{number}", pair) for number, pair in enumerate(pairs, 1)]
    return Document(
        title=f"Comparison with {pairs[0].first}",
        subtitle=" · ".join(pair.other for pair in pairs),
        about="",
        headline=headline(pairs[0]) if len(pairs) == 1 else f"{len(pairs)} comparisons.",
        points=[] if len(pairs) == 1 else [(pair.other, headline(pair)) for pair in pairs],
        next_steps=[],
        chapters=chapters,
        left_out=left_out,
    )


def _pair_page(name: str, pair: StudyPair) -> ChapterPage:
    sections = []
    for table in figure_tables(pair):
        columns = (
            "configuration",
            pair.first,
            pair.other,
            "ratio",
            "corrected interval",
            "significance",
        )
        rows = [
            (row.name, row.first, row.other, row.ratio, row.interval, row.significance)
            for row in table.rows
        ]
        sections.append(Section(slug(table.title), table.title, [Table(columns, rows)]))
    if pair.cells:
        told = [Text(text, "note") for text in notes(pair)]
        sections.append(Section("reading", "How to read the tables", told))
    for section, title, items in (
        ("differences", "What else differs", differences(pair)),
        ("unmatched", "Configurations without a match", unmatched(pair)),
    ):
        if items:
            sections.append(Section(section, title, [BulletList(items)]))
    return ChapterPage(name, f"{pair.other} against {pair.first}", "", "", sections)


def _of_cells(compared: Compared) -> Document:
    cells = compared.cells
    verdict = make_verdict(cells)
    columns = ("", *(cell.label for cell in cells))
    sections = [_rows("settings", "What differs in the settings", columns, setting_rows(cells))]
    results = _rows("results", "What came out", columns, result_rows(cells))
    sections.append(replace(results, blocks=[*results.blocks, *first_note(cells)]))
    tests = significance(cells)
    if tests:
        others = "others" if len(cells) > 2 else "other"
        rows = [(one.name, one.other, one.words()) for one in tests]
        note = interval_note([one.difference for one in tests])
        blocks: list[Block] = [
            Text(f"{cells[0].label} against the {others}, as a share of the other's figure:"),
            Table(("figure", "against", "difference"), rows, words=3),
            *([Text(note, "note")] if note else []),
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
        headline=verdict_headline(verdict),
        points=[(point.subject, point.text) for point in findings(verdict)],
        next_steps=next_steps(verdict),
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
