"""What there is to say of cells besides who is fastest: limits, stragglers, accuracy, trouble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline import formatting
from paceline.analysis.accuracy import compare_accuracy
from paceline.analysis.contention import CpuContention
from paceline.analysis.ranking import RankedGroup, deviations
from paceline.analysis.run_group import NOT_RUN, RunGroup
from paceline.analysis.straggler import Straggler
from paceline.analysis.world_sizes import described
from paceline.report.bound import NAMES, Bottleneck

WORSE_BY = 0.01
"""Accuracy that a faster cell may lose before it is said."""
NAMED = 4
"""Cells that are told one by one."""
MOST_LISTED = 10


@dataclass(frozen=True, slots=True)
class Point:
    """One finding: a word or two for its subject, and a sentence."""

    subject: str
    text: str


def bound_points(bounds: Sequence[Bottleneck]) -> list[Point]:
    """One point for each kind of limit and its cause, naming the cells that it holds for."""
    kinds: dict[tuple[str, str], list[Bottleneck]] = {}
    for bound in bounds:
        kinds.setdefault((bound.kind, bound.cause), []).append(bound)
    return [Point(kind.capitalize(), _bound_text(found)) for (kind, _), found in kinds.items()]


def _bound_text(found: Sequence[Bottleneck]) -> str:
    one = found[0]
    if len(found) == 1:
        return f"{one.label}: {one.reason()}."
    names = listed([bound.label for bound in found], NAMED)
    shares = [bound.shares[one.telling] for bound in found]
    low, high = formatting.share(min(shares)), formatting.share(max(shares))
    span = low if low == high else f"{low} to {high}"
    cause = ""
    if one.cause:
        wires = [bound.wire.seconds for bound in found if bound.wire is not None]
        cause = (
            f"; the bytes take at most {formatting.seconds(max(wires))} on the measured link,"
            f" so the likely cause is {one.cause}"
        )
    return f"{names}: {NAMES[one.telling]} is {span} of each iteration{cause}."


def straggler_points(found: Sequence[Straggler]) -> list[Point]:
    return [
        Point(
            "Straggler",
            f"{one.label}: worker {one.rank} on node {one.node}"
            f"{' (slowed down on purpose)' if one.is_injected else ''} computes for"
            f" {formatting.seconds(one.computing_seconds)} per iteration (others:"
            f" {formatting.seconds(one.others_seconds)}); the others wait"
            f" {formatting.seconds(one.wait_seconds)} for it,"
            f" {formatting.share(one.wait_share)} of their time.",
        )
        for one in found[:NAMED]
    ]


def disturbance_points(found: Sequence[CpuContention]) -> list[Point]:
    if not found:
        return []
    names = [f"{one.label} ({formatting.share(one.share)})" for one in found]
    return [
        Point(
            "CPU contention",
            f"timings may be affected: other processes used CPU time during {listed(names, NAMED)}."
            " Contention can explain differences, stragglers and bottlenecks of these"
            " configurations, so no straggler or bottleneck is named for them.",
        )
    ]


def approximate_points(cells: Sequence[RunGroup]) -> list[Point]:
    """Cells that compute something else than synchronous training, and how."""
    reasons: dict[str, list[str]] = {}
    for cell, reason in deviations(cells):
        reasons.setdefault(reason, []).append(cell.label)
    return [
        Point("Approximate", f"{listed(labels, NAMED)}: {reason}.")
        for reason, labels in reasons.items()
    ]


def learning_points(ranking: Sequence[RankedGroup]) -> list[Point]:
    """Whether being fast cost accuracy."""
    known = [
        (paced.cell, found)
        for paced in ranking
        if (found := paced.cell.mean_of("test_accuracy")) is not None
    ]
    if len(known) < 2 or known[0][0] is not ranking[0].cell:
        return []
    (fastest, of_fastest), (best, accuracy) = known[0], max(known, key=lambda item: item[1])
    if accuracy - of_fastest <= WORSE_BY:
        return []
    text = f"the fastest reaches {of_fastest:.4f}, {best.label} at {accuracy:.4f}"
    # The best is one of all the others, so chance had as many opportunities.
    return [
        Point("Accuracy", f"{text}{compare_accuracy(best, fastest, comparisons=len(known) - 1)}.")
    ]


def target_points(cells: Sequence[RunGroup]) -> list[Point]:
    """Cells that finished without reaching the target that they had."""
    missed = []
    for cell in cells:
        if not cell.finished or cell.config.target_accuracy is None:
            continue
        reached = sum(run.seconds_to_target is not None for run in cell.finished)
        if reached < len(cell.finished):
            part = f", reached by {reached} of {len(cell.finished)} runs" if reached else ""
            missed.append(f"{cell.label} ({cell.config.target_accuracy:g}{part})")
    return [Point("Target not reached", f"{listed(missed, MOST_LISTED)}.")] if missed else []


def resized_points(cells: Sequence[RunGroup]) -> list[Point]:
    """Runs whose times are not of all their iterations."""
    resized = [(cell, run) for cell in cells for run in cell.finished if run.is_resized]
    return [
        Point(
            "Workers changed",
            f"{cell.label}: {described(run.worlds)}; timings cover the last world size only.",
        )
        for cell, run in resized[:NAMED]
    ]


def resumed_points(cells: Sequence[RunGroup]) -> list[Point]:
    """Runs whose wall time is not of one piece."""
    resumed = [
        f"{cell.label} ({times} sessions)"
        for cell in cells
        for run in cell.finished
        if run.timing and (times := run.timing.processes) > 1 and not run.is_resized
    ]
    if not resumed:
        return []
    return [Point("Resumed", f"{listed(resumed, NAMED)}; wall time includes all sessions.")]


def trouble_points(cells: Sequence[RunGroup]) -> list[Point]:
    """Each cell that failed with its cause; those whose turn has not come are only named."""
    waiting = [cell for cell in cells if not cell.runs and cell.trouble == NOT_RUN]
    troubled = [cell for cell in cells if cell.is_troubled]
    troubled.sort(key=has_not_failed)
    points = [Point("Not finished", describe_trouble(cell)) for cell in troubled[:NAMED]]
    if len(troubled) > NAMED:
        rest = [cell.label for cell in troubled[NAMED:]]
        points.append(Point("Not finished", f"also {listed(rest, MOST_LISTED)}"))
    if waiting:
        names = [cell.label for cell in waiting]
        points.append(Point("Not run yet", listed(names, MOST_LISTED)))
    return points


def has_not_failed(cell: RunGroup) -> bool:
    """Sorts what went wrong before what was not brought to its end."""
    return "failed" not in (*(run.status for run in cell.runs), cell.trouble.partition(":")[0])


def describe_trouble(cell: RunGroup) -> str:
    if cell.runs and len(cell.finished) == len(cell.runs):
        return f"{cell.label}: a repeat {cell.cause}"
    said = cell.status if cell.runs else ""
    return ": ".join(filter(None, (cell.label, said, cell.cause)))


def listed(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more
