"""How surely a configuration speeds up, and why its efficiency may exceed 100%."""

from __future__ import annotations

from paceline import formatting
from paceline.analysis.scaling import ScalingPoint, ScalingSeries, superlinear_causes
from paceline.analysis.statistics import Difference
from paceline.report.wording.differences import interval_name


def speedup_interval(change: Difference) -> str:
    """The interval of a speedup over repeats, for the beginning of a note; empty without one."""
    if not change.across_runs:
        return ""
    tie = "not distinguishable from 1; " if change.is_tie else ""
    low, high = max(0.0, 1 + change.low), 1 + change.high
    return f"{tie}{interval_name(change)} {low:.2f} to {high:.2f}; "


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
