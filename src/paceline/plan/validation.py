"""Compares predictions with measured runs.

A run of the calibration is predicted without the runs of its configuration, which would make the
model exact for it. Its compute times stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from paceline.errors import NoPredictionError
from paceline.plan.calibration import Calibration, MeasuredRun
from paceline.plan.prediction import Interval, Predictor
from paceline.plan.target import Target


@dataclass(frozen=True, slots=True)
class Check:
    """A measured run and its prediction."""

    run: MeasuredRun
    predicted: Interval
    """Step time in seconds."""
    is_held_out: bool
    """Whether the run is no part of the calibration."""

    @property
    def error(self) -> float:
        """Relative to the measurement."""
        return self.predicted.median / self.run.step_seconds - 1

    @property
    def is_in_interval(self) -> bool:
        return self.predicted.low <= self.run.step_seconds <= self.predicted.high

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.run.name,
            "workers": self.run.workers,
            "strategy": self.run.strategy,
            "measured_seconds": self.run.step_seconds,
            "predicted_seconds": self.predicted.to_dict(),
            "error": self.error,
            "held_out": self.is_held_out,
        }


def validate(calibration: Calibration, held_out: Sequence[MeasuredRun] = ()) -> list[Check]:
    """Predict the runs of the calibration and others; runs that cannot be predicted are omitted."""
    found = []
    for run in calibration.runs:
        others = tuple(one for one in calibration.runs if Target.of(one) != Target.of(run))
        predictor = Predictor(replace(calibration, runs=others))
        found += _check(predictor, run, is_held_out=False)
    predictor = Predictor(calibration)
    return found + [check for run in held_out for check in _check(predictor, run, is_held_out=True)]


def median_error(checks: Sequence[Check]) -> float:
    return median(abs(check.error) for check in checks)


def _check(predictor: Predictor, run: MeasuredRun, *, is_held_out: bool) -> list[Check]:
    try:
        predicted = predictor.predict(Target.of(run)).step_seconds
    except NoPredictionError:
        return []
    return [Check(run, predicted, is_held_out)]
