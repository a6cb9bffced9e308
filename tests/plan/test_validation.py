"""Predictions of measured runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.plan.calibration import Calibration, MeasuredRun
from paceline.plan.prediction import Predictor
from paceline.plan.target import Target
from paceline.plan.validation import median_error, validate
from tests.support.calibrations import FAST, calibration


def run(strategy: str, factor: float = 1.0, workers: int = 2) -> MeasuredRun:
    """A run whose step takes `factor` times as long as predicted."""
    target = Target(strategy, workers, 64, hosts=workers, link=FAST)
    seconds = factor * float(Predictor(calibration(link=FAST)).predict(target).step_seconds.median)
    return MeasuredRun(strategy, {}, "gloo", workers, workers, FAST, 64 // workers, seconds, {})


def with_runs(*runs: MeasuredRun) -> Calibration:
    return replace(calibration(link=FAST), runs=runs)


def test_a_run_is_predicted_without_the_runs_of_its_configuration() -> None:
    (check,) = validate(with_runs(run("ring", 1.5)))
    assert check.error == pytest.approx(1 / 1.5 - 1, abs=0.02)
    assert not check.is_in_interval
    assert not check.is_held_out
    # A repeat has the same configuration, so it does not help.
    repeats = validate(with_runs(run("ring", 1.5), run("ring", 1.5)))
    assert [each.error for each in repeats] == pytest.approx([check.error] * 2)


def test_held_out_runs_are_predicted_from_all_runs() -> None:
    known, larger = run("ring", 1.2), run("ring", 1.2, workers=4)
    alone = validate(calibration(link=FAST), [larger])
    corrected = validate(with_runs(known), [larger])
    assert [each.is_held_out for each in corrected] == [False, True]
    assert abs(corrected[1].error) < abs(alone[0].error)
    assert corrected[1].is_in_interval


def test_runs_that_cannot_be_predicted_are_omitted() -> None:
    assert validate(calibration(link=FAST), [replace(run("ring"), strategy="mine")]) == []


def test_the_median_error_ignores_signs() -> None:
    checks = validate(calibration(link=FAST), [run("ring", 1.25), run("ring", 0.8), run("ddp")])
    assert median_error(checks) == pytest.approx(0.2, abs=0.02)
