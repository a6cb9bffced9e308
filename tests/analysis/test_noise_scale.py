"""What the noise scale predicts for other batch sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.analysis.noise_scale import (
    curve_of,
    relative_samples,
    relative_steps,
    steps_to_loss,
    whole_run,
)
from paceline.measure.noise_scale import NoiseSample


def test_steps_and_samples_follow_the_rule_of_the_noise_scale() -> None:
    assert relative_steps(100, 100) == 2
    assert relative_steps(1e12, 100) == pytest.approx(1)
    assert relative_samples(100, 100) == 2
    assert relative_samples(1e-9, 100) == pytest.approx(1)


def test_far_below_the_noise_scale_steps_halve_and_far_above_samples_double() -> None:
    assert relative_steps(2, 1e6, base_batch=1) == pytest.approx(0.5, rel=1e-5)
    assert relative_samples(2, 1e6, base_batch=1) == pytest.approx(1, rel=1e-5)
    assert relative_steps(2e6, 1, base_batch=1e6) == pytest.approx(1, rel=1e-5)
    assert relative_samples(2e6, 1, base_batch=1e6) == pytest.approx(2, rel=1e-5)


@pytest.mark.parametrize(("batch", "base_batch", "scale"), [(32, 64, 10.0), (512, 64, 4000.0)])
def test_samples_are_steps_times_batch(batch: int, base_batch: int, scale: float) -> None:
    steps = steps_to_loss(1000, base_batch, batch, scale)
    samples = 1000 * base_batch * relative_samples(batch, scale, base_batch)
    assert steps * batch == pytest.approx(samples)


def test_gradients_without_noise_need_no_batch() -> None:
    assert relative_steps(64, 0.0, base_batch=1) == 1
    assert relative_samples(64, 0.0) == math.inf
    assert relative_samples(64, 0.0, base_batch=32) == 2


def test_curve_follows_the_noise_scale_over_time() -> None:
    samples = [
        NoiseSample(step, 8.0, 16.0, 1 + scale / 8, 1 + scale / 16)
        for step, scale in enumerate([10.0] * 2000 + [50.0] * 2000)
    ]
    curve = curve_of(samples)
    assert curve is not None
    assert curve.values[len(curve.values) // 2 - 1] == pytest.approx(10)
    assert curve.values[-1] == pytest.approx(50, rel=0.01)
    assert curve_of([]) is None


def test_the_noise_scale_of_a_whole_run_predicts_its_steps() -> None:
    """Steps at another batch size, added up over a run with a changing noise scale."""
    base, batch = 16.0, 64.0
    scales = [10.0] * 200 + [50.0] * 100 + [400.0] * 200
    # Gradients become smaller during training.
    samples = [
        NoiseSample(step, 8.0, base, size * (1 + scale / 8), size * (1 + scale / base))
        for step, (scale, size) in enumerate(zip(scales, np.geomspace(100, 0.01, 500), strict=True))
    ]
    found = whole_run(samples)
    assert found is not None
    assert found.value is not None
    expected = math.fsum(relative_steps(batch, scale, base) for scale in scales)
    assert steps_to_loss(len(scales), base, batch, found.value) == pytest.approx(expected, rel=0.02)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high
    assert whole_run([]) is None
