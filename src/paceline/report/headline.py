"""Who is fastest, by how much, how surely and why, in a sentence each."""

from __future__ import annotations

from paceline.report import units
from paceline.report.cells import Cell
from paceline.report.pace import Pace, Paced
from paceline.report.phases import Explanation
from paceline.report.statistics import FEWEST_ITERATIONS, Difference


def headline(pace: Pace) -> str:
    """The fastest of two or more, by how much, and how surely."""
    first, second = pace.ranking[:2]
    lead = pace.between(first, second)
    time = f"{units.seconds(first.mean)} {pace.name}"
    if lead.is_significant:
        fastest = "is fastest" if lead.over_repeats else "was fastest in one repeat"
        return f"{first.cell.label} {fastest}: {time}, {less(lead)} than {second.cell.label}."
    if not lead.known:
        return (
            f"{first.cell.label} was fastest: {time}, {units.share(lead.share)} less than"
            f" {second.cell.label}; {_too_few(first, second)} to tell how surely."
        )
    return (
        f"No clear winner: {first.cell.label} took {time}, {units.share(lead.share)} less than"
        f" {second.cell.label}, which is within noise (95 % CI {_span(lead)})."
    )


def alone(pace: Pace, only: Paced) -> str:
    """Of a cell that there is none to hold against."""
    text = f"{only.cell.label}: {units.seconds(only.mean)} {pace.name}"
    accuracy = only.cell.mean_of("test_accuracy")
    if accuracy is not None:
        text += f", test accuracy {accuracy:.4f}"
    return f"{text}."


def less(gap: Difference) -> str:
    return f"{units.share(gap.share)} less (95 % CI {_span(gap)})"


def why(reason: Explanation) -> str:
    """A sentence on the phase in which the two differ most."""
    part, phase = reason.by_phase[reason.largest], reason.largest
    text = (
        f"{reason.slower} needs {units.seconds(reason.seconds)} longer for {reason.work} than"
        f" {reason.faster}; "
    )
    if part <= 0:
        return f"{text}its phases do not tell why."
    most = "most" if part >= reason.seconds / 2 else "the largest part"
    against = [
        f"{name} {units.seconds(-value)} less"
        for name, value in sorted(reason.by_phase.items(), key=lambda item: item[1])
        if value < -0.1 * reason.seconds
    ]
    tail = f"; {', '.join(against[:2])}" if against else ""
    return f"{text}{most} of it is {phase}: {units.seconds(part)} more{tail}."


def why_to_target(first: Cell, second: Cell) -> str:
    """How many iterations each took, and of which length: fewer or shorter ones make it faster."""
    return f"{_to_target(first)}; {_to_target(second)}."


def _to_target(cell: Cell) -> str:
    counts = [count for run in cell.finished if (count := run.iterations_to_target) is not None]
    text = f"{cell.label} took {units.spread(counts, units.count)} iterations to the target"
    if cell.iteration_means:
        text += f" of {units.spread(cell.iteration_means, units.seconds)} each"
    return text


def _too_few(first: Paced, second: Paced) -> str:
    fewest = min(run.iterations for paced in (first, second) for run in paced.cell.finished)
    if fewest < FEWEST_ITERATIONS:
        return f"one repeat of {fewest} iterations is too little"
    return "one repeat is too little"


def _span(gap: Difference) -> str:
    # Nothing takes less than no time, whatever the interval's arithmetic gives.
    return f"{100 * gap.low:.1f} to {100 * min(gap.high, 1.0):.1f} %"
