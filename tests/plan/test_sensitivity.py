"""What limits a step: the effect of one change at a time."""

from __future__ import annotations

import pytest

from paceline.plan.links import Link
from paceline.plan.prediction import Predictor
from paceline.plan.sensitivity import Effect, sensitivity
from paceline.plan.target import Target
from tests.support.calibrations import LINK, calibration


def effects(target: Target) -> dict[str, Effect]:
    return {each.change: each for each in sensitivity(Predictor(calibration()), target).effects}


def test_halving_every_part_of_a_step_halves_the_step() -> None:
    found = effects(Target("ring", 4, 64, link=LINK))
    parts = ("compute twice as fast", "bandwidth x 2", "latency / 2")
    assert all(found[each].step_seconds.high < 0 for each in parts)
    assert sum(found[each].step_seconds.median for each in parts) == pytest.approx(-0.5, abs=0.01)


def test_the_effect_of_the_batch_on_the_throughput_counts_its_samples() -> None:
    found = effects(Target("single", 1, 32))
    assert list(found) == ["compute twice as fast", "batch x 2"]
    # 10 ms and 1 ms per sample.
    assert found["batch x 2"].step_seconds.median == pytest.approx(74 / 42 - 1, rel=1e-3)
    assert found["batch x 2"].throughput.median == pytest.approx(2 * 42 / 74 - 1, rel=1e-3)
    assert not found["batch x 2"].is_extrapolated
    assert effects(Target("single", 1, 64))["batch x 2"].is_extrapolated


def test_other_bucket_sizes_are_shown_if_they_change_the_buckets() -> None:
    """Gradients are 4.2 MiB: a bucket of 25 MiB or more holds all of them."""
    names = [each for each in effects(Target("ddp", 4, 64, link=LINK)) if "MiB" in each]
    assert names == []
    small = Target("ddp", 4, 64, {"bucket_mib": "1"}, link=LINK)
    names = [each for each in effects(small) if "MiB" in each]
    assert names == ["buckets of 0.25 MiB, now 1", "buckets of 4 MiB, now 1"]


def test_a_slow_worker_matters_where_workers_wait_for_it() -> None:
    fast = Link(100e9)
    slow = "one worker 1.3 times slower"
    synchronous = effects(Target("ring", 4, 64, link=fast))[slow].step_seconds.median
    options = {"mode": "async"}
    asynchronous = effects(Target("parameter_server", 4, 64, options, link=fast))[slow]
    assert synchronous > 0.15
    assert asynchronous.step_seconds.median < synchronous / 2
