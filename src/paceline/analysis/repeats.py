"""Loss, accuracy and step time of a group, merged over its repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from paceline.analysis.curves import Curve, merge_repeats
from paceline.analysis.phases import iterations_in_epoch
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.validation import is_number


def evaluation_curve(group: RunGroup, key: str, axis: str) -> Curve | None:
    """An evaluated figure against iteration, epoch or seconds: test_loss, or a metric by name."""
    curves = [curve for run in group.shown if len(curve := _evaluations(run, key, axis))]
    if not curves:
        return None
    if axis == "seconds":
        # Repeats reach the same iteration at different times: plot them at their mean time.
        by_iteration = [_evaluations(run, key, "iteration") for run in group.shown]
        merged, repeats = merge_repeats([curve for curve in by_iteration if len(curve)])
        same = [curve for curve in curves if len(curve) == len(curves[0])]
        if len(same) == repeats:
            times = np.mean([curve.x for curve in same], axis=0)
            return Curve(times, merged.middle, merged.low, merged.high)
    return merge_repeats(curves)[0]


def evaluated(entry: Mapping[str, Any], key: str) -> Any:
    """A figure of an evaluation: of its entry in the history, or a metric by its name."""
    return entry[key] if key in entry else entry.get("metrics", {}).get(key)


def _evaluations(run: Run, key: str, axis: str) -> Curve:
    found = [(entry[axis], evaluated(entry, key)) for entry in run.history]
    rows = [(at, value) for at, value in found if is_number(value)]
    x = np.array([at for at, _ in rows], dtype=np.float64)
    y = np.array([value for _, value in rows], dtype=np.float64)
    return Curve(x, y, y, y)


def training_loss_curve(group: RunGroup, axis: str) -> Curve | None:
    """The training loss of rank 0 against iteration, epoch or seconds.

    Against seconds it is that of the first run, since repeats have no points in common.
    """
    curves = []
    for run in group.shown:
        if run.timing is None or not len(run.timing.loss):
            continue
        curve = run.timing.loss_by_time if axis == "seconds" else run.timing.loss
        if axis == "epoch":
            per_epoch = iterations_in_epoch(run)
            if per_epoch is None:
                continue
            curve = Curve(curve.x / per_epoch, curve.middle, curve.low, curve.high)
        curves.append(curve)
    if not curves:
        return None
    return curves[0] if axis == "seconds" else merge_repeats(curves)[0]


def step_time_curve(group: RunGroup) -> Curve | None:
    """Seconds per iteration against the iteration, without the first one."""
    curves = [run.timing.seconds for run in group.shown if run.timing is not None]
    curves = [curve for curve in curves if len(curve)]
    return merge_repeats(curves)[0] if curves else None


def outlier_limit(curves: Sequence[Curve]) -> float | None:
    """Upper limit of an axis that a few slow iterations would flatten; None without such."""
    highs = [curve.high for curve in curves if len(curve)]
    if not highs:
        return None
    # A quantile per curve, so that a slow configuration with few iterations stays visible.
    usual = max(float(np.quantile(high, 0.98)) for high in highs)
    most = max(float(high.max()) for high in highs)
    return usual * 1.6 if most > 4 * usual else None


@dataclass(frozen=True, slots=True)
class StepTimeSummary:
    """Seconds per iteration, one value per finished run; `firsts` alone has the first iteration."""

    label: str
    means: list[float]
    """Mean over ranks, like medians and p95s; `Run.iteration_seconds` for asynchronous runs."""
    medians: list[float]
    p95s: list[float]
    firsts: list[float]


def summarize_step_times(group: RunGroup) -> StepTimeSummary | None:
    timings = [run.timing for run in group.timed if run.timing is not None]
    if not timings:
        return None
    return StepTimeSummary(
        group.label,
        group.iteration_means,
        [timing.median for timing in timings],
        [timing.p95 for timing in timings],
        [fmean(rank.first for rank in timing.ranks) for timing in timings],
    )
