"""Workers of one host slow each other's compute, as measured side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import RecordsError
from paceline.plan import host_sharing
from paceline.plan.calibration import (
    Calibration,
    MeasuredRun,
    SideBySide,
    SizePoint,
)
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
        cores_per_worker=1.0,
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
    assert [host.oversubscription(workers) for workers in (2, 4, 8)] == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(("workers", "slowdown"), [(2, 1.1), (3, 1.5 * 1.3), (4, 3.0), (8, 6.0)])
def test_what_turns_cost_besides_is_measured_beyond_the_cores_too(
    workers: int, slowdown: float
) -> None:
    """On two cores, two workers take 1.1 times as long each, four 1.5 times as long as in turns."""
    points = (*POINTS[:2], SideBySide(4, (0.03,) * 4))
    host = HostSharing(replace(measured(cores=2), side_by_side=points))
    assert host.compute(workers) == pytest.approx(slowdown)


def test_a_step_ends_late_if_the_last_turns_do_not_fill_the_cores() -> None:
    """Three workers of 2 ms on two cores take 3 ms with equal shares, 4 ms in whole turns."""
    host = HostSharing(replace(measured(cores=2), side_by_side=()))
    assert host.late_seconds(3, 3e-3) == pytest.approx(1e-3)
    # The kernel does not let a worker wait for longer.
    assert host.late_seconds(3, 1.0) == pytest.approx(4e-3)
    assert host.late_seconds(3, 3e-3, steps=8) == pytest.approx(4e-3 / 8)
    assert [host.late_seconds(workers, 3e-3) for workers in (1, 2, 4, 8)] == [0.0] * 4


def test_one_worker_with_more_threads_than_cores_waits_for_no_other() -> None:
    """Its measured time has all of its threads."""
    host = HostSharing(replace(measured(cores=2), cores_per_worker=3.0, side_by_side=()))
    assert host.late_seconds(1, 3e-3) == 0.0


@pytest.mark.parametrize(
    ("strategy", "options", "late"),
    [
        ("ring", {}, 4e-3),
        ("local_sgd", {"every": "16"}, 4e-3 / 16),
        ("parameter_server", {"mode": "async"}, 0.0),
    ],
)
def test_steps_that_end_together_end_late(
    strategy: str, options: dict[str, str], late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers compute for 39 ms on two cores."""
    known = replace(measured(cores=2), side_by_side=())
    target = Target(strategy, 3, 48, options)

    def seconds() -> float:
        return Predictor(known, samples=1).typical_step_seconds(target)

    found = seconds()
    monkeypatch.setattr(host_sharing, "SLICE_SECONDS", 0.0)
    assert found - seconds() == pytest.approx(late)


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


def with_collectives_of(workers: int, factor: float, cores: int = 64) -> Calibration:
    """Collectives of that many workers whose rounds take `factor` times as long."""
    (few,) = WITHIN_HOST
    rounds, more = workers - 1, []
    for point in few.points:
        # Rounds of a ring have a share of the tensor: those of two workers have half of it.
        size = point.size_bytes * workers // 2
        seconds = tuple(factor * rounds * each for each in point.seconds)
        more.append(SizePoint(size, seconds))
    many = replace(few, workers=workers, points=tuple(more))
    return replace(
        calibration(collectives=[few, many]),
        hardware={"cpu": "a CPU", "cores": cores},
        cores_per_worker=1.0,
    )


@pytest.mark.parametrize(("workers", "factor"), [(2, 1.0), (5, 2.0), (8, 3.0)])
def test_rounds_take_as_long_as_those_of_about_as_many_workers(workers: int, factor: float) -> None:
    """Linear between measured numbers of workers; cores make no difference there."""
    for cores in (2, 64):
        known = with_collectives_of(8, 3.0, cores)
        exchange = exchange_seconds(known, "ring", workers)
        # Two rounds per peer, of 0.5 ms and 10 ns for each byte of a share.
        expected = 2 * (workers - 1) * (0.5e-3 + known.gradient_bytes / workers / 100e6)
        assert exchange == pytest.approx(factor * expected, rel=1e-3)


def test_intervals_of_more_workers_than_runs_had_are_wider() -> None:
    """Whatever was measured with workers that do not compute in between."""
    known = with_collectives_of(8, 3.0)
    phases = {"input": 0.0, "forward": 0.0126, "backward": 0.0252, "update": 0.0042}

    def width(workers: int) -> float:
        exchange = exchange_seconds(known, "ring", workers)
        run = MeasuredRun(
            "ring", {}, "gloo", workers, 1, None, 32, 0.042 + exchange,
            {**phases, "exchange": exchange},
        )  # fmt: skip
        predictor = Predictor(replace(known, runs=(run,)))
        step = predictor.predict(Target("ring", 8, 8 * 32)).step_seconds
        return (step.high - step.low) / step.median

    assert width(2) > 1.2 * width(8)


def test_collectives_of_more_workers_than_were_measured_share_the_cores() -> None:
    known = with_collectives_of(8, 3.0, cores=2)
    expected = 2 * 15 * (0.5e-3 + known.gradient_bytes / 16 / 100e6)
    assert exchange_seconds(known, "ring", 16) == pytest.approx(2 * 3 * expected, rel=1e-3)


@pytest.mark.parametrize(
    ("strategy", "longer"),
    # As much longer as with two workers, whose rounds take a third of the time; or, for all
    # tensors at once, the mean of that and of twice as long.
    [("allreduce", 1 / 3), ("ring", (1 / 3 + 1) / 2)],
)
def test_more_workers_do_not_multiply_all_that_two_show(strategy: str, longer: float) -> None:
    """With two workers, exchanges take twice as long in a run as in a benchmark."""
    known = with_collectives_of(8, 3.0)
    alone = {each: exchange_seconds(known, strategy, each) for each in (2, 8)}
    step = 0.042 + 2 * alone[2]
    phases = {"input": 0.0, "forward": 0.0126, "backward": 0.0252, "update": 0.0042}
    phases["exchange"] = 2 * alone[2]
    run = MeasuredRun(strategy, {}, "gloo", 2, 1, None, 32, step, phases)
    for workers, expected in ((2, 2 * alone[2]), (8, alone[8] * (1 + longer))):
        exchange = exchange_seconds(replace(known, runs=(run,)), strategy, workers)
        assert exchange == pytest.approx(expected, rel=0.01)


def exchange_seconds(known: Calibration, strategy: str, workers: int) -> float:
    predictor = Predictor(known, samples=1)
    step = predictor.typical_step_seconds(Target(strategy, workers, 16 * workers))
    # Workers beyond the cores take turns.
    compute = 0.026 * max(1.0, workers / float(known.hardware["cores"]))
    return step - compute - HostSharing(known).late_seconds(workers, compute)


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
    record = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**record, "kind": "comm"}))
    assert read_side_by_side(tmp_path, "lenet") == ()


@pytest.mark.parametrize("workers", [(2,), (1, 2, 2)])
def test_one_worker_and_each_other_number_are_measured_once(
    workers: tuple[int, ...], tmp_path: Path
) -> None:
    write_side_by_side(tmp_path, "lenet", [SideBySide(count, (0.01,) * count) for count in workers])
    with pytest.raises(RecordsError, match=f"{FILE} is damaged: one worker, and each other"):
        read_side_by_side(tmp_path, "lenet")


@pytest.mark.parametrize("seconds", ["[]", "[0.0]", '["fast"]'])
def test_a_damaged_record_is_named(seconds: str, tmp_path: Path) -> None:
    points = f'[{{"workers": 1, "step_seconds": {seconds}}}]'
    (tmp_path / FILE).write_text(
        f'{{"schema": 1, "kind": "side_by_side", "model": "lenet", "points": {points}}}'
    )
    with pytest.raises(RecordsError, match=f"{FILE} is damaged"):
        read_side_by_side(tmp_path, "lenet")
