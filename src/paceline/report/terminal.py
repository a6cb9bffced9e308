"""Comparisons and the cost of steps in the terminal, within 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from rich.console import Console
from rich.table import Table

from paceline.analysis.collection import Chapter, SkippedRecord
from paceline.analysis.comparison import Comparison, FigureTable, StudyPair, significance
from paceline.analysis.run_group import RunGroup
from paceline.analysis.step_cost import step_costs
from paceline.analysis.verdict import make_verdict
from paceline.report.comparison import (
    Row,
    differences,
    pair_rows,
    result_rows,
    setting_rows,
    unmatched,
)
from paceline.report.sections.step_cost import step_cost_table
from paceline.report.wording.differences import format_difference, interval_note
from paceline.report.wording.findings import script_faults
from paceline.report.wording.headline import headline
from paceline.report.wording.study_pair import pair_headline, pair_notes
from paceline.terminal import open_console, paragraph

WIDTH = 80
GROUPS_IN_A_TABLE = 4
"""As many as fit beside the names of the rows."""
NAME_WIDTH = 16
"""At least, for names in a table: the values beside them are folded first."""
MOST_TESTED = 8
"""Configurations in the list of differences; a page has them all."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_SKIPPED_LINES = 5
"""Skipped records that are named; a page names all."""


def print_comparison(compared: Comparison) -> None:
    """Studies configuration by configuration; other groups side by side, as columns A, B, ..."""
    groups = compared.groups
    console = open_console(width=WIDTH)
    if compared.pairs:
        _print_pairs(console, compared.pairs)
        _print_skipped(console, compared)
        return
    letters = [_letter(index) for index in range(len(groups))]
    for letter, group in zip(letters, groups, strict=True):
        console.print(f"{letter}  {group.label}", overflow="fold")
    console.print()
    settings, results = setting_rows(groups), result_rows(groups)
    rest = iter(range(len(groups)))
    while block := list(islice(rest, GROUPS_IN_A_TABLE)):
        console.print(_table(block, letters, settings, results))
        console.print()
    if len(groups) > 1:
        _print_significance(console, groups, letters)
        verdict = make_verdict(groups)
        console.print(paragraph(headline(verdict), console))
        for text in script_faults(verdict):
            console.print(paragraph(text, console))
    _print_skipped(console, compared)


def _print_skipped(console: Console, compared: Comparison) -> None:
    for line in skipped_lines(compared.skipped, "the page that --html writes"):
        console.print(line)


def _print_pairs(console: Console, pairs: Sequence[StudyPair]) -> None:
    """The columns of each table are headed by the letters of the studies."""
    names = [pairs[0].first, *(pair.other for pair in pairs)]
    for number, name in enumerate(names):
        console.print(f"{_letter(number)}  {name}", overflow="fold")
    for number, pair in enumerate(pairs, 1):
        letter = _letter(number)
        for table in pair.tables:
            console.print(f"\n{table.title}")
            console.print(_pair_table(table, letter))
        console.print()
        notes = pair_notes(pair) if pair.matches else []
        for text in (pair_headline(pair), *notes):
            console.print(paragraph(text, console))
        for lead, text in (*differences(pair), *unmatched(pair)):
            console.print(paragraph(f"{lead} {text}", console))


def _pair_table(table: FigureTable, letter: str) -> Table:
    shown = Table(box=None, pad_edge=False)
    shown.add_column("configuration", overflow="fold", min_width=NAME_WIDTH)
    for heading in ("A", letter):
        shown.add_column(heading, justify="right", overflow="fold")
    for heading in (f"{letter}/A", "corrected\ninterval", "significance"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in pair_rows(table):
        shown.add_row(*row.cells)
    return shown


def _letter(index: int) -> str:
    return LETTERS[index] if index < len(LETTERS) else f"{index + 1}"


def _table(
    block: Sequence[int], letters: Sequence[str], settings: Sequence[Row], results: Sequence[Row]
) -> Table:
    table = Table(box=None, pad_edge=False)
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
    console: Console, groups: Sequence[RunGroup], letters: Sequence[str]
) -> None:
    """All configurations are tested together, as on the page, though only some are printed."""
    named = dict(zip((group.label for group in groups[:MOST_TESTED]), letters, strict=False))
    tests = significance(groups)
    for one in tests:
        is_shown = one.name.startswith("time per") or one.difference.has_interval
        if is_shown and one.other in named:
            text = format_difference(one.difference)
            console.print(f"A against {named[one.other]}, {one.name}: {text}")
    if len(groups) > MOST_TESTED:
        console.print(f"{len(groups) - MOST_TESTED} more on the page that --html writes")
    if note := interval_note([one.difference for one in tests]):
        console.print(paragraph(note, console))


def print_step_costs(console: Console, chapters: Sequence[Chapter]) -> None:
    """The table of the section `step_cost`, of each part that names it."""
    for chapter in chapters:
        costs = step_costs(chapter.groups)
        if "step_cost" not in chapter.sections or not costs:
            continue
        table = step_cost_table(costs)
        shown = Table(box=None, pad_edge=False, title=chapter.title, title_justify="left")
        shown.add_column(table.columns[0], overflow="fold")
        for heading in table.columns[1:]:
            shown.add_column(heading, justify="right", no_wrap=True)
        for row in table.rows:
            shown.add_row(*row)
        console.print()
        console.print(shown)


def skipped_lines(
    skipped: Sequence[SkippedRecord], names_all: str = "the end of the page"
) -> list[str]:
    """The first few skipped records, how many more there are, and where all are named."""
    lines = [f"skipped     {one.name}: {one.reason}" for one in skipped[:MAX_SKIPPED_LINES]]
    if len(skipped) > MAX_SKIPPED_LINES:
        more = len(skipped) - MAX_SKIPPED_LINES
        lines.append(f"skipped     and {more:,} more: {names_all} names all")
    return lines
