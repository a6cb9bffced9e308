"""Workers of one host slow each other's compute, as measured side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import RecordsError
from paceline.plan.calibration import Calibration, Contention, MeasuredRun, SideBySide
from paceline.plan.host_sharing import FILE, HostSharing, read_side_by_side, write_side_by_side
from paceline.plan.prediction import Predictor
from paceline.plan.target import Target
from tests.support.calibrations import LINK, calibration, timing

POINTS = (SideBySide(1, (0.01,)), SideBySide(2, (0.01, 0.012)), SideBySide(4, (0.015,) * 4))
"""Slowdowns of 1.1 and 1.5."""
WITHIN_HOST = [timing("all_reduce", "ring", 1e-3, 100e6, link=None)]


def measured(cores: int = 64) -> Calibration:
    hardware = {"cpu": "a CPU", "cores": cores}
    return replace(
        calibration(collectives=WITHIN_HOST),
        hardware=hardware,
        contention=Contention(cores_per_worker=1.0),
        side_by_side=POINTS,
    )


@pytest.mark.parametrize(
    ("workers", "slowdown"), [(1, 1.0), (2, 1.1), (3, 1.3), (4, 1.5), (16, 1.5)]
)
def test_slowdown_is_linear_between_measured_numbers_of_workers(
    workers: int, slowdown: float
) -> None:
    assert HostSharing(measured()).compute(workers) == pytest.approx(slowdown)


def test_workers_beyond_the_cores_take_turns() -> None:
    host = HostSharing(measured(cores=4))
    assert host.compute(8) == pytest.approx(2 * 1.5)
    assert [host.cores(workers) for workers in (2, 4, 8)] == [1.0, 1.0, 2.0]


def test_faster_workers_side_by_side_are_noise() -> None:
    points = (SideBySide(1, (0.01,)), SideBySide(2, (0.009,) * 2))
    assert HostSharing(replace(measured(), side_by_side=points)).compute(2) == 1.0


def test_predictions_slow_compute_and_not_communication() -> None:
    four = Target("ring", 4, 64)
    steps = [
        Predictor(each, samples=1).typical_step_seconds(four)
        for each in (replace(measured(), side_by_side=()), measured())
    ]
    # 10 ms and 1 ms for each of 16 samples.
    assert steps[1] - steps[0] == pytest.approx(0.5 * 0.026)


def test_workers_on_hosts_of_their_own_are_not_slowed() -> None:
    across = replace(calibration(), side_by_side=POINTS)
    four = Target("ring", 4, 64, link=LINK)
    seconds = [
        Predictor(each, samples=1).typical_step_seconds(four) for each in (calibration(), across)
    ]
    assert seconds[0] == seconds[1]


def test_runs_that_show_the_same_slowdown_are_not_slowed_twice() -> None:
    phases = {"input": 0.0, "forward": 1.1 * 0.3 * 0.042, "exchange": 0.03}
    run = MeasuredRun("ring", {}, "gloo", 2, 1, None, 32, 0.07, phases)
    predictor = Predictor(replace(measured(), runs=(run,)), samples=1)
    step = predictor.predict(Target("ring", 2, 64)).step_seconds.median
    assert step == pytest.approx(1.1 * 0.042 + 0.03, rel=0.01)


def test_a_record_is_read_for_its_own_model_only(tmp_path: Path) -> None:
    assert read_side_by_side(tmp_path, "lenet") == ()
    write_side_by_side(tmp_path, "lenet", POINTS)
    assert read_side_by_side(tmp_path, "lenet") == POINTS
    assert read_side_by_side(tmp_path, "mlp") == ()


@pytest.mark.parametrize("seconds", ["[]", "[0.0]", '["fast"]'])
def test_a_damaged_record_is_named(seconds: str, tmp_path: Path) -> None:
    points = f'[{{"workers": 1, "step_seconds": {seconds}}}]'
    (tmp_path / FILE).write_text(
        f'{{"schema": 1, "kind": "side_by_side", "model": "lenet", "points": {points}}}'
    )
    with pytest.raises(RecordsError, match=f"{FILE} is damaged"):
        read_side_by_side(tmp_path, "lenet")
