"""Which way wins when: a study's last axis is what can be chosen, the others are what is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from paceline import formatting
from paceline.analysis.phases import explain, iteration_breakdown
from paceline.analysis.ranking import RankedGroup, Ranking, iteration_pace
from paceline.analysis.run_group import RunGroup
from paceline.analysis.statistics import Difference, against_first
from paceline.report.document import Block, BulletList, Table, Text
from paceline.report.sections.outline import SectionContext
from paceline.report.sections.phases import spent
from paceline.report.wording import beside_exact, explanation_text, ranking_headline

TITLE = "Fastest by condition"


@dataclass(frozen=True, slots=True)
class ConditionRanking:
    """Ways held against one another under one condition."""

    condition: str
    pace: Ranking
    """Of the exact ways where there are any, else of all; labelled by their way."""
    lead: Difference | None
    """How much longer the second takes; None where there is no second."""
    approximate: Ranking | None = None
    """Of ways that compute something else, beside exact ones."""
    approximate_lead: Difference | None = None

    @property
    def winner(self) -> str:
        return self.pace.ranking[0].cell.label

    @property
    def is_clear(self) -> bool:
        return self.lead is not None and self.lead.is_significant

    @property
    def headline(self) -> str:
        if self.approximate is None:
            return ranking_headline(self.pace, self.lead)
        others = beside_exact(self.approximate, self.approximate_lead, self.pace.ranking[0])
        return f"{ranking_headline(self.pace, self.lead, 'exact')} {others}"


def contests(cells: Sequence[RunGroup]) -> list[ConditionRanking]:
    """By condition; none where cells have fewer than two axes, or nothing to choose from."""
    # By what is chosen too: cells that a study includes may lack its last axis.
    groups: dict[tuple[str, str], list[RunGroup]] = {}
    for cell in cells:
        if len(cell.axes) > 1 and cell.timed:
            *given, (chosen, way) = cell.axes.items()
            condition = ", ".join(_named(axis, value) for axis, value in given)
            named = dataclasses.replace(cell, label=_named(chosen, way))
            groups.setdefault((condition, chosen), []).append(named)
    # One measure for all, as they share a table.
    whole = iteration_pace([cell for group in groups.values() for cell in group])
    found: list[tuple[str, Ranking, Ranking]] = []
    for (condition, _), group in groups.items():
        exact, others = Ranking(whole.name, _of(group, whole)).apart()
        if len(group) > 1:
            found.append((condition, exact, others))
    # Told together, so all their pairs are one family of comparisons.
    gaps = iter(against_first([pace.samples for _, *both in found for pace in both]))
    leads = [[own[0] if own else None for own in (next(gaps), next(gaps))] for _ in found]
    return [
        ConditionRanking(condition, exact, of_exact, others, of_others)
        if exact.ranking and others.ranking
        else ConditionRanking(
            condition, *((exact, of_exact) if exact.ranking else (others, of_others))
        )
        for (condition, exact, others), (of_exact, of_others) in zip(found, leads, strict=True)
    ]


def _named(axis: str, value: str) -> str:
    """A number alone does not tell what it is of."""
    if any(letter.isalpha() for letter in value):
        return value
    return f"{axis.rpartition('.')[2].replace('_', ' ')} {value}"


def _of(group: Sequence[RunGroup], pace: Ranking) -> list[RankedGroup]:
    own = {id(cell) for cell in group}
    return [one for one in pace.ranking if id(one.cell) in own]


def build(outline: SectionContext) -> list[Block]:
    found = contests(outline.cells)
    if not found:
        return []
    items = []
    for contest in found:
        reason = None
        # Noise has no reason.
        if contest.lead is not None and not contest.lead.is_tie:
            first, second = contest.pace.ranking[:2]
            reason = explain(first.cell, second.cell)
        text = contest.headline
        if reason is not None and reason.seconds > 0:
            text += f" {_sentence(explanation_text(reason))}"
        items.append((f"{contest.condition}:", text))
    return [
        Text(answer(found), "answer"),
        BulletList(items),
        Table(
            ("condition", "choice", f"time {found[0].pace.name}", "of the fastest", "compute",
             "communication", "waiting", "test accuracy"),
            [row for contest in found for row in _rows(contest)],
            words=2,
        ),
        Text(
            "In asynchronous runs, an iteration is the time in which all workers together process"
            " as many samples as a global batch has. Compute, communication and waiting are of a"
            " worker's own iteration.",
            "note",
        ),
    ]  # fmt: skip


def answer(found: Sequence[ConditionRanking]) -> str:
    names = {contest.winner for contest in found}
    tail = _doubt(found) + _approximate(found)
    if len(names) == 1:
        given = "; ".join(contest.condition for contest in found)
        fastest = "is the fastest exact choice" if _approximate(found) else "is fastest"
        return f"{found[0].winner} {fastest} in every case ({given}).{tail}"
    each = "; ".join(f"{contest.condition}: {contest.winner}" for contest in found)
    if len({contest.winner for contest in found if contest.is_clear}) > 1:
        return f"The fastest depends on the setup. {_sentence(each)}.{tail}"
    return f"The fastest may depend on the setup. {_sentence(each)}.{tail}"


def _doubt(found: Sequence[ConditionRanking]) -> str:
    """Conditions whose winner is not significantly faster than the second, and why not."""
    leads = [(contest.condition, contest.lead) for contest in found if contest.lead is not None]
    ties = [condition for condition, lead in leads if lead.is_tie]
    single = [condition for condition, lead in leads if not lead.is_tie and not lead.is_significant]
    text = f" Within noise: {'; '.join(ties)}." if ties else ""
    return text + (f" Single run, significance unknown: {'; '.join(single)}." if single else "")


def _approximate(found: Sequence[ConditionRanking]) -> str:
    fastest = [
        f"{contest.condition}: {contest.approximate.ranking[0].cell.label}"
        for contest in found
        if contest.approximate is not None
    ]
    if not fastest:
        return ""
    return f" Fastest approximate, which computes something else: {'; '.join(fastest)}."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _rows(contest: ConditionRanking) -> list[tuple[str, ...]]:
    fastest = contest.pace.ranking[0].mean
    others = contest.approximate.ranking if contest.approximate else []
    return [
        (
            contest.condition,
            paced.cell.label + " (approximate)" * (paced in others),
            formatting.spread(paced.values, formatting.seconds),
            f"{paced.mean / fastest:.2f} times" if fastest else "-",
            *spent(iteration_breakdown(paced.cell)),
            formatting.number(paced.cell.mean_of("test_accuracy")),
        )
        for paced in (*contest.pace.ranking, *others)
    ]
