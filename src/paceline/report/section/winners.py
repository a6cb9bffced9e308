"""Which way wins when: a study's last axis is what can be chosen, the others are what is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report import units
from paceline.report.cells import Cell
from paceline.report.document import Block, Items, Table, Text
from paceline.report.headline import headline, why
from paceline.report.pace import Pace, Paced, iteration_pace
from paceline.report.phases import explain, of_cell
from paceline.report.section.outline import Outline
from paceline.report.section.phases import spent

TITLE = "Which wins when"


@dataclass(frozen=True, slots=True)
class Contest:
    """Ways held against one another under one condition."""

    condition: str
    pace: Pace
    """Its cells are labelled by their way."""

    @property
    def winner(self) -> str:
        return self.pace.ranking[0].cell.label

    @property
    def is_clear(self) -> bool:
        first, second = self.pace.ranking[:2]
        return self.pace.between(first, second).is_significant


def contests(cells: Sequence[Cell]) -> list[Contest]:
    """By condition; none where cells have fewer than two axes, or nothing to choose from."""
    # By what is chosen too: cells that a study includes may lack its last axis.
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if len(cell.axes) > 1 and cell.timed:
            *given, (chosen, way) = cell.axes.items()
            condition = ", ".join(_named(axis, value) for axis, value in given)
            named = dataclasses.replace(cell, label=_named(chosen, way))
            groups.setdefault((condition, chosen), []).append(named)
    # One measure for all, as they share a table.
    whole = iteration_pace([cell for group in groups.values() for cell in group])
    return [
        Contest(condition, Pace(whole.name, _of(group, whole)))
        for (condition, _), group in groups.items()
        if len(group) > 1
    ]


def _named(axis: str, value: str) -> str:
    """A number alone does not tell what it is of."""
    if any(letter.isalpha() for letter in value):
        return value
    return f"{axis.rpartition('.')[2].replace('_', ' ')} {value}"


def _of(group: Sequence[Cell], pace: Pace) -> list[Paced]:
    own = {id(cell) for cell in group}
    return [one for one in pace.ranking if id(one.cell) in own]


def build(outline: Outline) -> list[Block]:
    found = contests(outline.cells)
    if not found:
        return []
    items = []
    for contest in found:
        first, second = contest.pace.ranking[:2]
        gap = contest.pace.between(first, second)
        # Noise has no reason.
        reason = explain(first.cell, second.cell) if gap.is_significant or not gap.known else None
        told = f" {_sentence(why(reason))}" if reason is not None and reason.seconds > 0 else ""
        items.append((f"{contest.condition}:", headline(contest.pace) + told))
    return [
        Text(answer(found), "answer"),
        Items(items),
        Table(
            ("given", "way", f"time {found[0].pace.name}", "of the fastest", "computing",
             "communicating", "waiting", "test accuracy"),
            [row for contest in found for row in _rows(contest)],
            words=2,
        ),
        Text(
            "Out of step, an iteration is the time in which all workers together get through as"
            " many samples as a global batch has. Computing, communicating and waiting are of a"
            " worker's own iteration.",
            "note",
        ),
    ]  # fmt: skip


def answer(found: Sequence[Contest]) -> str:
    names = {contest.winner for contest in found}
    doubtful = [contest.condition for contest in found if not contest.is_clear]
    doubt = f" Not beyond doubt: {'; '.join(doubtful)}." if doubtful else ""
    if len(names) == 1:
        given = "; ".join(contest.condition for contest in found)
        return f"{found[0].winner} is fastest in every case ({given}).{doubt}"
    each = "; ".join(f"{contest.condition}: {contest.winner}" for contest in found)
    if len({contest.winner for contest in found if contest.is_clear}) > 1:
        return f"The fastest depends on what is given. {_sentence(each)}.{doubt}"
    return f"The fastest may depend on what is given. {_sentence(each)}.{doubt}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _rows(contest: Contest) -> list[tuple[str, ...]]:
    fastest = contest.pace.ranking[0].mean
    return [
        (
            contest.condition,
            paced.cell.label,
            units.spread(paced.values, units.seconds),
            f"{paced.mean / fastest:.2f} times" if fastest else "-",
            *spent(of_cell(paced.cell)),
            units.number(paced.cell.mean_of("test_accuracy")),
        )
        for paced in contest.pace.ranking
    ]
