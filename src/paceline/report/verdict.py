"""What the numbers say, in words: first the answer, then why, then what to try.

Every sentence is computed from the records. A difference that lies within the noise is called that,
and a single repeat is told as one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline import formatting
from paceline.analysis.communication import read_comm
from paceline.analysis.contention import disturbances, rerun_sentence
from paceline.analysis.phases import Explanation, explain
from paceline.analysis.ranking import TO_TARGET, RankedGroup, Ranking, is_exact, rank_groups
from paceline.analysis.run_group import RunGroup
from paceline.analysis.statistics import Difference, against_first
from paceline.analysis.straggler import Straggler, find_straggler
from paceline.report.advice import recommend
from paceline.report.bound import Bottleneck, find_bottleneck
from paceline.report.findings import (
    MOST_LISTED,
    NAMED,
    Point,
    approximate_points,
    bound_points,
    describe_trouble,
    disturbance_points,
    has_not_failed,
    learning_points,
    listed,
    resized_points,
    resumed_points,
    straggler_points,
    target_points,
    trouble_points,
)
from paceline.report.headline import beside_exact, headline, less, why, why_to_target
from paceline.report.wording import superlinear_note


@dataclass(slots=True)
class Verdict:
    headline: str
    points: list[Point] = field(default_factory=list)
    next_steps: list[str] = field(default_factory=list)
    pace: Ranking | None = None
    """Of the exact cells where there are any, else of all."""
    approximate: Ranking | None = None
    """Of cells that compute something else, where they are ranked apart from exact ones."""
    lead: Difference | None = None
    """How much longer the second takes than the first."""
    ties: list[RankedGroup] = field(default_factory=list)
    """Cells that the fastest cannot be told from."""
    gaps: list[Difference] = field(default_factory=list)
    """How much longer each later cell of `pace` takes than the first."""
    stragglers: list[Straggler] = field(default_factory=list)
    bounds: list[Bottleneck] = field(default_factory=list)
    explanation: Explanation | None = None


def make_verdict(cells: Sequence[RunGroup], comm: Sequence[Path] = ()) -> Verdict:
    """`comm` are files with measurements of the network, by `paceline comm --json`."""
    kinds = _kinds(cells)
    alike = max(kinds.values(), key=len) if len(kinds) > 1 else cells
    exact, approximate = rank_groups(alike).apart()
    is_apart = bool(exact.ranking and approximate.ranking)
    pace = exact if exact.ranking else approximate
    ranking = pace.ranking
    verdict = Verdict("", pace=pace, approximate=approximate if is_apart else None)
    busy = disturbances(cells)
    # On a busy machine contention explains what looks like a straggler or a bottleneck.
    disturbed = {one.label for one in busy}
    verdict.stragglers = [
        one
        for cell in cells
        if (one := find_straggler(cell)) is not None
        and (cell.label not in disturbed or one.is_injected)
    ]
    measured = [one for path in comm for one in read_comm(path)]
    verdict.bounds = [
        bound
        for cell in cells
        if cell.label not in disturbed and (bound := find_bottleneck(cell, measured)) is not None
    ]
    if len(kinds) > 1 and len(alike) == 1:
        verdict.headline = "Not compared: every configuration uses a different model or dataset."
        verdict.pace, ranking = None, []
    elif not ranking:
        verdict.headline = _nothing_ranked(cells)
    else:
        rank(verdict, disturbed)
        winners = [one.ranking[0].cell for one in _paces(verdict)]
        verdict.headline += superlinear_note(winners, alike)
    if len(kinds) > 1 and ranking:
        verdict.headline = f"Of {_kind(alike[0])}: {verdict.headline}"
    others = [kind for kind in kinds.values() if kind is not alike or not ranking]
    if len(kinds) > 1:
        verdict.points += [_apart(kind) for kind in others[:MOST_LISTED]]
    verdict.points += approximate_points(cells)
    verdict.points += disturbance_points(busy)
    verdict.points += bound_points(verdict.bounds)
    verdict.points += straggler_points(verdict.stragglers)
    verdict.points += learning_points(ranking)
    verdict.points += target_points(cells)
    verdict.points += resized_points(cells)
    verdict.points += resumed_points(cells)
    verdict.points += trouble_points(cells)
    verdict.headline += rerun_sentence(busy)
    verdict.next_steps = recommend(
        verdict.pace, cells, verdict.gaps, verdict.stragglers, verdict.bounds, busy
    )
    return verdict


def _paces(verdict: Verdict) -> list[Ranking]:
    return [one for one in (verdict.pace, verdict.approximate) if one is not None]


def _kinds(cells: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """Cells with a finished run by model and data: across these no time can be compared."""
    kinds: dict[str, list[RunGroup]] = {}
    for cell in cells:
        if cell.finished:
            kinds.setdefault(_kind(cell), []).append(cell)
    return kinds


def _kind(cell: RunGroup) -> str:
    return f"{cell.config.model} on {cell.config.data}"


def _apart(kind: Sequence[RunGroup]) -> Point:
    return Point("Ranked separately", f"{_kind(kind[0])}: {make_verdict(kind).headline}")


def _nothing_ranked(cells: Sequence[RunGroup]) -> str:
    count = sum(len(cell.runs) for cell in cells)
    if not count:
        return "Nothing was run yet."
    if any(cell.finished for cell in cells):
        return "No iteration of a finished run was timed."
    text = "The run did not finish" if count == 1 else f"None of the {count} runs finished"
    # A cell that was not run is no reason why others did not finish.
    ran = [cell for cell in cells if cell.runs]
    troubled = sorted((cell for cell in ran if cell.cause), key=has_not_failed)
    if not troubled:
        return f"{text}."
    reason = troubled[0].cause if count == 1 else describe_trouble(troubled[0])
    return f"{text}: {reason.rstrip('.')}."


def rank(verdict: Verdict, disturbed: Collection[str] = ()) -> None:
    """Name the fastest, by how much and how surely; also the second and the last.

    A difference that involves a `disturbed` configuration is not explained by its phases.
    """
    paces = _paces(verdict)
    pace, *others = paces
    found = against_first([one.samples for one in paces])
    verdict.gaps = found[0]
    leads = [gaps[0] if gaps else None for gaps in found]
    if others:
        verdict.headline = f"{headline(pace, leads[0], 'exact')} " + beside_exact(
            others[0], leads[1], pace.ranking[0]
        )
    else:
        verdict.headline = headline(pace, leads[0])
        if len(pace.ranking) > 1 and not any(is_exact(one.cell) for one in pace.ranking):
            verdict.headline += " All of these are approximate: compare accuracy as well as time."
    if len(pace.ranking) > 1:
        _compare(verdict, pace, list(zip(pace.ranking[1:], found[0], strict=True)), disturbed)


def _compare(
    verdict: Verdict,
    pace: Ranking,
    gaps: Sequence[tuple[RankedGroup, Difference]],
    disturbed: Collection[str],
) -> None:
    first, (second, lead), last = pace.ranking[0], gaps[0], pace.ranking[-1]
    verdict.lead = lead
    # A difference without an interval cannot be told from noise, but neither is it a tie.
    verdict.ties = [other for other, gap in gaps if gap.is_tie]
    also = [tie.cell.label for tie in verdict.ties if tie is not second]
    if also:
        verdict.points.append(Point("Tied with the fastest", f"{listed(also, NAMED)}."))
    told = [second, *verdict.ties]
    against = second
    if lead.is_tie:
        clear = [(other, gap) for other, gap in gaps if gap.is_significant]
        if clear:
            against, gap = clear[0]
            told.append(against)
            verdict.points.append(_beyond_noise(pace, against, gap))
    if not any(last is one for one in told):
        times = f", {last.mean / first.mean:.2f} times the fastest" if first.mean else ""
        text = f"{last.cell.label}: {formatting.seconds(last.mean)} {pace.name}{times}."
        verdict.points.append(Point("Slowest", text))
    verdict.points.append(_confidence(pace, lead))
    is_disturbed = first.cell.label in disturbed or against.cell.label in disturbed
    if not is_disturbed and not any(against is tie for tie in verdict.ties):
        _explain(verdict, pace, first.cell, against.cell)


def _beyond_noise(pace: Ranking, other: RankedGroup, gap: Difference) -> Point:
    return Point(
        "First clear difference",
        f"{other.cell.label} takes {formatting.seconds(other.mean)} {pace.name};"
        f" {pace.ranking[0].cell.label} takes {less(gap)}.",
    )


def _explain(verdict: Verdict, pace: Ranking, first: RunGroup, against: RunGroup) -> None:
    verdict.explanation = explain(first, against)
    if pace.name == TO_TARGET:
        verdict.points.append(Point("Why", why_to_target(first, against)))
    elif verdict.explanation is not None and verdict.explanation.seconds > 0:
        verdict.points.append(Point("Why", why(verdict.explanation)))


def _confidence(pace: Ranking, lead: Difference) -> Point:
    repeats = [len(paced.values) for paced in pace.ranking]
    if lead.across_runs:
        several = [count for count in repeats if count > 1]
        low, high = min(several), max(several)
        span = f"{low}" if low == high else f"{low} to {high}"
        text = (
            f"intervals are over {span} repeats of each configuration (Welch's t){_corrected(lead)}"
        )
        if len(several) < len(repeats):
            text += (
                "; for a configuration with a single run they are from blocks of its iterations,"
                " probably too narrow, and significance is unknown"
            )
        return Point("Confidence", f"{text}.")
    if lead.has_interval:
        return Point(
            "Confidence",
            "single run, significance unknown: intervals are from blocks of iterations within each"
            f" run{_corrected(lead)}; probably too narrow.",
        )
    return Point(
        "Confidence", "single run, significance unknown: run-to-run variation was not measured."
    )


def _corrected(gap: Difference) -> str:
    if gap.comparisons < 2:
        return ""
    return f", corrected for {gap.comparisons:,} comparisons (Holm)"
