"""Sentences about what the analysis found."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import formatting
from paceline.analysis.run_group import RunGroup
from paceline.analysis.scaling import (
    ScalingPoint,
    ScalingSeries,
    scaling_series,
    superlinear_causes,
)


def efficiency_text(series: ScalingSeries, point: ScalingPoint) -> str:
    """Above 100% beyond noise with its likely reason, since linear speedup is the limit."""
    text = f"efficiency {formatting.share(series.efficiency(point))}"
    if not series.is_superlinear(point):
        return text
    return f"{text}, above 100%; likely reason: {superlinear_reason(series, point)}"


def superlinear_reason(series: ScalingSeries, point: ScalingPoint) -> str:
    causes = superlinear_causes(series, point)
    reasons = []
    if causes.contention is not None:
        used = formatting.share(causes.contention)
        reasons.append(f"CPU contention (other processes used up to {used} of the machine)")
    if causes.threads is not None:
        before, after = causes.threads
        reasons.append(f"threads ({before} per worker in the base, {after} here)")
    if causes.cores is not None:
        reasons.append(
            f"a slow base run ({causes.cores:g} cores cannot give a speedup of {point.speedup:.2f})"
        )
    if reasons:
        return " and ".join(reasons)
    if series.kind == "strong":
        return "CPU cache (each worker has a smaller batch) or a slow base run"
    return "a slow base run"


def superlinear_note(winners: Sequence[RunGroup], cells: Sequence[RunGroup]) -> str:
    """A sentence for each winner whose efficiency is above 100%; empty where there is none."""
    flagged = {
        id(point.group): f" {point.group.label}: scaling {efficiency_text(series, point)}."
        for series in scaling_series(cells)
        for point in series.points
        if series.is_superlinear(point)
    }
    return "".join(flagged.get(id(cell), "") for cell in winners)
