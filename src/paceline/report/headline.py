"""Who is fastest, by how much, how surely and why, in a sentence each."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import formatting
from paceline.analysis.phases import Explanation
from paceline.analysis.ranking import RankedGroup, Ranking
from paceline.analysis.run_group import RunGroup
from paceline.analysis.statistics import FEWEST_ITERATIONS, Difference


def headline(pace: Ranking, lead: Difference | None, scope: str = "") -> str:
    """The fastest, by how much, and how surely; `scope` is `exact` or `approximate`.

    `lead` is how much longer the second takes; None where there is no second.
    """
    first = pace.ranking[0]
    time = f"{formatting.seconds(first.mean)} {pace.name}"
    label = first.cell.label
    if lead is None:
        return f"Fastest {scope}: {label}, {time}." if scope else alone(pace, first)
    second = pace.ranking[1].cell.label
    if lead.is_tie:
        among = f" among {scope} configurations" if scope else ""
        return (
            f"No clear winner{among}: {label} took {time}, {formatting.share(lead.share)} less time"
            f" than {second}, which is within noise ({_span(lead)})."
        )
    if lead.is_significant:
        lead_text = f"{time}, {less(lead)} than {second}"
    else:
        gap = formatting.share(lead.share)
        lead_text = f"{time}, {gap} less time than {second} ({_single(pace.ranking[:2])})"
    if scope:
        return f"Fastest {scope}: {label}, {lead_text}."
    return f"{label} {'is' if lead.is_significant else 'was'} fastest: {lead_text}."


def beside_exact(pace: Ranking, lead: Difference | None, exact: RankedGroup) -> str:
    """The fastest approximate configuration, and its accuracy beside that of the fastest exact."""
    text = "Approximate configurations compute something else"
    first = pace.ranking[0].cell
    own, other = first.mean_of("test_accuracy"), exact.cell.mean_of("test_accuracy")
    if own is not None and other is not None:
        text += f": test accuracy {own:.4f} with {first.label}, {other:.4f} with exact training"
        text += f" ({exact.cell.label})"
    return f"{headline(pace, lead, 'approximate')} {text}."


def alone(pace: Ranking, only: RankedGroup) -> str:
    """Of a cell that there is none to compare with."""
    text = f"{only.cell.label}: {formatting.seconds(only.mean)} {pace.name}"
    accuracy = only.cell.mean_of("test_accuracy")
    if accuracy is not None:
        text += f", test accuracy {accuracy:.4f}"
    return f"{text}."


def less(gap: Difference) -> str:
    return f"{formatting.share(gap.share)} less time ({_span(gap)})"


def why(reason: Explanation) -> str:
    """A sentence on the phase in which the two differ most."""
    part, phase = reason.by_phase[reason.largest], reason.largest
    text = (
        f"{reason.slower} takes {formatting.seconds(reason.seconds)} more {reason.work} than"
        f" {reason.faster}"
    )
    if part <= 0:
        return f"{text}; the phase breakdown does not explain it."
    most = "mostly in" if part >= reason.seconds / 2 else "most of all in"
    against = [
        f"{name} {formatting.seconds(value)}"
        for name, value in sorted(reason.by_phase.items(), key=lambda item: item[1])
        if value < -0.1 * reason.seconds
    ]
    tail = f"; {', '.join(against[:2])}" if against else ""
    return f"{text}, {most} {phase} (+{formatting.seconds(part)}){tail}."


def why_to_target(first: RunGroup, second: RunGroup) -> str:
    """How many iterations each took, and of which length: fewer or shorter ones make it faster."""
    return f"{_to_target(first)}; {_to_target(second)}."


def _to_target(cell: RunGroup) -> str:
    counts = [count for run in cell.finished if (count := run.iterations_to_target) is not None]
    text = (
        f"{cell.label} took {formatting.spread(counts, formatting.count)} iterations to the target"
    )
    if cell.iteration_means:
        text += f" of {formatting.spread(cell.iteration_means, formatting.seconds)} each"
    return text


def _single(pair: Sequence[RankedGroup]) -> str:
    fewest = min((run.iterations for paced in pair for run in paced.cell.finished), default=0)
    if fewest < FEWEST_ITERATIONS and not all(paced.blocks for paced in pair):
        return f"single run of {fewest} iterations, significance unknown"
    return "single run, significance unknown"


def _span(gap: Difference) -> str:
    # Nothing takes less than no time, whatever the interval's arithmetic gives.
    span = f"{formatting.share(gap.low)} to {formatting.share(min(gap.high, 1.0))}"
    return f"{gap.interval_name} {span}"


def interval_note(gaps: Sequence[Difference]) -> str:
    """What the intervals of differences that are tested together are; empty for a plain CI."""
    most = max((gap.comparisons for gap in gaps if gap.has_interval), default=1)
    if most < 2:
        return ""
    return (
        "Corrected interval: Welch's t at the level of Holm's method for"
        f" {most:,} comparisons. It excludes zero exactly where the difference is significant."
    )
