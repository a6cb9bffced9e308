"""What the numbers say, in words: first the answer, then why, then what to try.

Every sentence is computed from the records. A difference that lies within the noise is called that,
and a single repeat is told as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.report import units
from paceline.report.advice import advise
from paceline.report.bound import Bound, bound_of
from paceline.report.cells import NOT_RUN, Cell
from paceline.report.pace import TO_TARGET, Pace, Paced, choose_pace
from paceline.report.phases import Explanation, explain
from paceline.report.statistics import FEWEST_ITERATIONS, Difference
from paceline.report.straggler import Straggler, find_straggler

WORSE_BY = 0.01
"""Accuracy that a faster cell may lose before it is said."""
NAMED = 4
"""Failed cells that are told one by one, with their cause."""
MOST_LISTED = 10


@dataclass(frozen=True, slots=True)
class Point:
    """One finding: a word or two for its subject, and a sentence."""

    subject: str
    text: str


@dataclass(slots=True)
class Verdict:
    headline: str
    points: list[Point] = field(default_factory=list)
    next_steps: list[str] = field(default_factory=list)
    pace: Pace | None = None
    lead: Difference | None = None
    """How much longer the second takes than the first."""
    ties: list[Paced] = field(default_factory=list)
    """Cells that the fastest cannot be told from."""
    stragglers: list[Straggler] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    explanation: Explanation | None = None


def judge(cells: Sequence[Cell]) -> Verdict:
    kinds = _kinds(cells)
    alike = max(kinds.values(), key=len) if len(kinds) > 1 else cells
    pace = choose_pace(alike)
    ranking = pace.ranking
    verdict = Verdict("", pace=pace)
    verdict.stragglers = [one for cell in cells if (one := find_straggler(cell)) is not None]
    verdict.bounds = [bound for cell in cells if (bound := bound_of(cell)) is not None]
    if len(kinds) > 1 and len(alike) == 1:
        verdict.headline = "Not compared: each of the cells has a model or data of its own."
        verdict.pace, ranking = None, []
    elif not ranking:
        verdict.headline = _nothing_finished(cells)
    elif len(ranking) == 1:
        verdict.headline = _alone(pace, ranking[0])
    else:
        _rank(verdict, pace)
        if len(kinds) > 1:
            verdict.headline = f"Of {_kind(alike[0])}: {verdict.headline}"
    others = [kind for kind in kinds.values() if kind is not alike or not ranking]
    if len(kinds) > 1:
        verdict.points += [_apart(kind) for kind in others[:MOST_LISTED]]
    verdict.points += _bound_points(verdict.bounds)
    verdict.points += [_straggler_point(one) for one in verdict.stragglers[:NAMED]]
    verdict.points += _learning_points(ranking)
    verdict.points += _trouble_points(cells)
    verdict.next_steps = advise(verdict.pace, cells, verdict.ties, verdict.stragglers)
    return verdict


def _kinds(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells with a finished run by model and data: across these no time can be compared."""
    kinds: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.finished:
            kinds.setdefault(_kind(cell), []).append(cell)
    return kinds


def _kind(cell: Cell) -> str:
    return f"{cell.config.model} on {cell.config.data}"


def _apart(kind: Sequence[Cell]) -> Point:
    return Point("Not compared with others", f"{_kind(kind[0])}: {judge(kind).headline}")


def _nothing_finished(cells: Sequence[Cell]) -> str:
    count = sum(len(cell.runs) for cell in cells)
    if not count:
        return "Nothing was run yet."
    text = "The run did not finish" if count == 1 else f"None of the {count} runs finished"
    troubled = sorted((cell for cell in cells if cell.cause), key=_has_not_failed)
    if not troubled:
        return f"{text}."
    why = troubled[0].cause if count == 1 else _trouble(troubled[0])
    return f"{text}: {why.rstrip('.')}."


def _alone(pace: Pace, only: Paced) -> str:
    text = f"{only.cell.label}: {units.seconds(only.mean)} {pace.name}"
    accuracy = only.cell.mean_of("test_accuracy")
    if accuracy is not None:
        text += f", test accuracy {accuracy.mean:.4f}"
    return f"{text}."


def _rank(verdict: Verdict, pace: Pace) -> None:
    """Who is fastest, by how much and how surely; the second and the last are told."""
    first, second, last = pace.ranking[0], pace.ranking[1], pace.ranking[-1]
    lead = verdict.lead = pace.between(first, second)
    # A difference without an interval cannot be told from noise, but neither is it a tie.
    verdict.ties = [
        other
        for other in pace.ranking[1:]
        if (found := pace.between(first, other)).known and not found.is_significant
    ]
    verdict.headline = headline(pace)
    if len(verdict.ties) > 1:
        names = "; ".join(tie.cell.label for tie in verdict.ties[1 : NAMED + 1])
        more = f" and {len(verdict.ties) - NAMED - 1} more" if len(verdict.ties) > NAMED + 1 else ""
        verdict.points.append(Point("Also within noise", f"of the fastest: {names}{more}."))
    clear = [other for other in pace.ranking[1:] if pace.between(first, other).is_significant]
    if verdict.ties and clear:
        gap = pace.between(first, clear[0])
        verdict.points.append(
            Point(
                "Beyond noise",
                f"{clear[0].cell.label} takes {units.seconds(clear[0].mean)} {pace.name};"
                f" {first.cell.label} takes {_less(gap)}.",
            )
        )
    if last is not second and not (clear and last is clear[0]):
        verdict.points.append(
            Point(
                "Slowest",
                f"{last.cell.label}: {units.seconds(last.mean)} {pace.name},"
                f" {last.mean / first.mean:.2f} times the fastest.",
            )
        )
    verdict.points.append(_confidence(pace, lead))
    against = (clear[0] if verdict.ties and clear else second).cell
    if lead.is_significant or clear or not lead.known:
        verdict.explanation = explain(first.cell, against)
        if pace.name == TO_TARGET:
            told = f"{_to_target(first.cell)}; {_to_target(against)}."
            verdict.points.append(Point("Why", told))
        elif verdict.explanation is not None and verdict.explanation.seconds > 0:
            verdict.points.append(Point("Why", why(verdict.explanation)))


def _to_target(cell: Cell) -> str:
    """How many iterations it took, and of which length: fewer or shorter ones make it faster."""
    counts = [count for run in cell.finished if (count := run.iterations_to_target) is not None]
    text = f"{cell.label} took {units.spread(counts, units.count)} iterations to the target"
    if cell.iteration_means:
        text += f" of {units.spread(cell.iteration_means, units.seconds)} each"
    return text


def headline(pace: Pace) -> str:
    """The fastest of two or more, by how much, and how surely."""
    first, second = pace.ranking[:2]
    lead = pace.between(first, second)
    time = f"{units.seconds(first.mean)} {pace.name}"
    if lead.is_significant:
        return f"{first.cell.label} is fastest: {time}, {_less(lead)} than {second.cell.label}."
    if not lead.known:
        return (
            f"{first.cell.label} was fastest: {time}, {units.share(lead.share)} less than"
            f" {second.cell.label}; {_too_few(first, second)} to tell how surely."
        )
    return (
        f"No clear winner: {first.cell.label} took {time}, {units.share(lead.share)} less than"
        f" {second.cell.label}, which is within noise (95 % CI {_span(lead)})."
    )


def _too_few(first: Paced, second: Paced) -> str:
    fewest = min(run.iterations for paced in (first, second) for run in paced.cell.finished)
    if fewest < FEWEST_ITERATIONS:
        return f"one repeat of {fewest} iterations is too little"
    return "one repeat is too little"


def _less(gap: Difference) -> str:
    return f"{units.share(gap.share)} less (95 % CI {_span(gap)})"


def _span(gap: Difference) -> str:
    # Nothing takes less than no time, whatever the interval's arithmetic gives.
    return f"{100 * gap.low:.1f} to {100 * min(gap.high, 1.0):.1f} %"


def _confidence(pace: Pace, lead: Difference) -> Point:
    repeats = sorted({len(paced.values) for paced in pace.ranking})
    if lead.known and lead.over_repeats:
        span = f"{repeats[0]}" if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
        return Point("Confidence", f"intervals are over {span} repeats of each cell (Welch's t).")
    if lead.known:
        return Point(
            "Confidence",
            "one repeat of a cell: the spread between runs is unknown, and the interval is over"
            " stretches of the runs' iterations, so it is too narrow rather than too wide.",
        )
    return Point("Confidence", "one repeat of a cell: the spread between runs is unknown.")


def why(reason: Explanation) -> str:
    """A sentence on the phase in which the two differ most."""
    part, phase = reason.by_phase[reason.largest], reason.largest
    text = (
        f"{reason.slower} needs {units.seconds(reason.seconds)} longer for {reason.work} than"
        f" {reason.faster}; most of it is {phase}: {units.seconds(part)} more"
    )
    against = [
        f"{name} {units.seconds(-value)} less"
        for name, value in sorted(reason.by_phase.items(), key=lambda item: item[1])
        if value < -0.1 * reason.seconds
    ]
    return f"{text}{'; ' + ', '.join(against[:2]) if against else ''}."


def _bound_points(bounds: Sequence[Bound]) -> list[Point]:
    """One point for each kind of limit, naming the cells that it holds for."""
    kinds: dict[str, list[Bound]] = {}
    for bound in bounds:
        kinds.setdefault(bound.kind, []).append(bound)
    return [Point(kind.capitalize(), _bound_text(found)) for kind, found in kinds.items()]


def _bound_text(found: Sequence[Bound]) -> str:
    one = found[0]
    if len(found) == 1:
        return f"{one.label}: {one.reason()}."
    names = "; ".join(bound.label for bound in found[:NAMED])
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    key = one.telling
    shares = [bound.shares[key] for bound in found]
    low, high = units.share(min(shares)), units.share(max(shares))
    span = low if low == high else f"{low} to {high}"
    return f"{names}{more}: {key} is {span} of an iteration."


def _straggler_point(one: Straggler) -> Point:
    asked = " (slowed down on purpose)" if one.is_asked_for else ""
    return Point(
        "Straggler",
        f"{one.label}: worker {one.rank} on node {one.node}{asked} computes"
        f" {units.seconds(one.computing_seconds)} an iteration, the others"
        f" {units.seconds(one.others_seconds)}; they wait {units.seconds(one.wait_seconds)} for it,"
        f" {units.share(one.wait_share)} of their time.",
    )


def _learning_points(ranking: Sequence[Paced]) -> list[Point]:
    """Whether being fast cost accuracy."""
    known = [
        (paced, found.mean)
        for paced in ranking
        if (found := paced.cell.mean_of("test_accuracy")) is not None
    ]
    if len(known) < 2:
        return []
    best, accuracy = max(known, key=lambda item: item[1])
    of_fastest = {id(paced): value for paced, value in known}.get(id(ranking[0]))
    if of_fastest is None or accuracy - of_fastest <= WORSE_BY:
        return []
    return [
        Point(
            "Accuracy",
            f"the fastest ends at {of_fastest:.4f}, {best.cell.label} at {accuracy:.4f}.",
        )
    ]


def _trouble_points(cells: Sequence[Cell]) -> list[Point]:
    """Each cell that failed with its cause; those whose turn has not come are only named."""
    waiting = [cell.label for cell in cells if not cell.runs and cell.trouble == NOT_RUN]
    troubled = [
        cell
        for cell in cells
        if len(cell.finished) < max(1, len(cell.runs)) and cell.label not in waiting
    ]
    troubled.sort(key=_has_not_failed)
    points = [Point("Not finished", _trouble(cell)) for cell in troubled[:NAMED]]
    if len(troubled) > NAMED:
        rest = [cell.label for cell in troubled[NAMED:]]
        points.append(Point("Not finished", f"also {_listed(rest)}"))
    if waiting:
        points.append(Point("Not run yet", _listed(waiting)))
    return points


def _has_not_failed(cell: Cell) -> bool:
    """Sorts what went wrong before what was not brought to its end."""
    return "failed" not in (*(run.status for run in cell.runs), cell.trouble.partition(":")[0])


def _trouble(cell: Cell) -> str:
    said = cell.status if cell.runs else ""
    return ": ".join(filter(None, (cell.label, said, cell.cause)))


def _listed(names: Sequence[str]) -> str:
    more = f"; and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return "; ".join(names[:MOST_LISTED]) + more
