"""The advised batch size against a recorded sweep over batch sizes (benchmarks/batch_sweep.py)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.plan.advice import advise
from paceline.plan.calibration import Calibration
from paceline.plan.target import Target

RECORDED = json.loads((Path(__file__).parent / "recorded" / "batch_sweep.json").read_text())


@pytest.mark.parametrize(("data", "expected"), [("digits", (128, 256)), ("mnist", (256,))])
def test_the_advised_batch_is_within_1_3_times_of_the_best(
    data: str, expected: Sequence[int]
) -> None:
    """On digits, the predictions for two batch sizes differ by 4%."""
    calibration = Calibration.from_dict(RECORDED[data]["calibration"])
    advice = advise(calibration, [Target("allreduce", 2, 64)])
    advised = advice.best.target.samples
    assert advised in expected
    times = {
        row["batch"]: statistics.median(row["steps"]) * row["step_seconds"]
        for row in RECORDED[data]["sweep"]
    }
    assert times[advised] <= 1.3 * min(times.values())


@pytest.mark.parametrize("data", list(RECORDED))
def test_predicted_steps_are_close_to_those_of_the_sweep(data: str) -> None:
    learning = Calibration.from_dict(RECORDED[data]["calibration"]).learning
    assert learning is not None
    assert learning.steps is not None
    for row in RECORDED[data]["sweep"]:
        predicted = learning.steps * learning.relative_steps(row["batch"])
        # Seeds differ by more than that.
        assert 1 / 1.4 < predicted / statistics.median(row["steps"]) < 1.4
