"""A backward pass is longer by launches and contention, by as much as runs show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.plan.calibration import MeasuredRun, SideBySide
from paceline.plan.collective_cost import CollectiveTime
from paceline.plan.overlap_costs import (
    CONTENTION_DEVIATION,
    FSDP_DEVIATION,
    LAUNCH_DEVIATION,
    LAUNCH_SECONDS,
    OverlapCosts,
    overlap_costs,
)
from paceline.plan.overlap_simulation import Transfer, simulate_overlap
from paceline.plan.prediction import Predictor
from paceline.plan.target import Target
from tests.support.calibrations import LINK, calibration, point, timing

ALONE = 0.0252
"""Backward pass of the calibration with 32 samples."""
TARGET = Target("overlap", 4, 64, link=LINK)
EXACT = 1e-6
"""Relative deviation of backward passes that hardly vary."""


def run(strategy: str, longer: float, hidden: float, **options: str) -> MeasuredRun:
    """Two workers whose backward pass takes longer than `ALONE`."""
    phases = dict(point(32, 0.042).phases)
    phases["backward"] += longer
    return MeasuredRun(
        strategy, options, "gloo", 2, 2, LINK, 32,
        step_seconds=0.1,
        phases={**phases, "exchange": 0.1 - sum(phases.values())},
        hidden_exchange_seconds=hidden,
    )  # fmt: skip


def costs(*runs: MeasuredRun, target: Target = TARGET, deviation: float = EXACT) -> OverlapCosts:
    return overlap_costs(runs, target, lambda _: ALONE, deviation)


@pytest.mark.parametrize(
    ("ready", "seconds", "contention", "backward", "hidden"),
    [
        # Communication never stops.
        (0.0, 10.0, 0.5, 1.5, 1.5),
        # In the quarter of a second that it takes, an eighth is computed.
        (0.5, 0.25, 1.0, 1.125, 0.25),
        (0.5, 0.25, 0.0, 1.0, 0.25),
    ],
)
def test_only_the_time_with_a_collective_in_progress_is_longer(
    ready: float, seconds: float, contention: float, backward: float, hidden: float
) -> None:
    transfer = Transfer(ready, CollectiveTime(0.0, seconds))
    times = simulate_overlap(1.0, [transfer], contention=contention)
    assert times.backward == pytest.approx(backward)
    assert times.hidden == pytest.approx(hidden)


def test_encoding_does_not_make_a_slowed_backward_pass_faster() -> None:
    encoding = Transfer(0.0, CollectiveTime(0.0, 0.0, codec_seconds=10.0))
    assert simulate_overlap(1.0, [encoding], contention=2.0).backward == pytest.approx(3.0)
    assert simulate_overlap(1.0, [encoding], contention=0.5).backward == pytest.approx(2.0)


def test_contention_is_what_the_overlapped_time_does_not_explain() -> None:
    """Of 10 ms, 6 were left for the backward pass: each took 10 / 6 times as long."""
    slowed = run("overlap", LAUNCH_SECONDS + 0.004, 0.010)
    assert costs(slowed).contention == pytest.approx(4 / 6)
    assert costs(run("overlap", LAUNCH_SECONDS, 0.010)).contention == pytest.approx(0.0)
    # If nothing was left, something else took the time.
    assert costs(run("overlap", 0.011, 0.010)).contention == 0.0


def test_launches_are_what_a_backward_pass_without_overlap_takes_longer() -> None:
    assert costs(run("overlap", 0.0007, 0.0003)).launch_seconds == pytest.approx(0.0007)
    assert costs(run("overlap", -0.0007, 0.0003)).launch_seconds == 0.0
    both = costs(run("overlap", 0.001, 0.0), run("overlap", 0.005, 0.010))
    assert both.launch_seconds == pytest.approx(0.001)
    assert both.contention == pytest.approx(4 / 6)


def test_noisy_runs_hardly_change_what_is_usual() -> None:
    """Noise that is as large as what is usual moves the estimate half of the way."""
    noise = LAUNCH_DEVIATION / ALONE
    found = costs(run("overlap", LAUNCH_SECONDS + 0.002, 0.0), deviation=noise)
    assert found.launch_seconds == pytest.approx(LAUNCH_SECONDS + 0.001)
    noise = CONTENTION_DEVIATION * 0.006 / ALONE
    found = costs(run("overlap", LAUNCH_SECONDS + 0.004, 0.010), deviation=noise)
    assert found.contention == pytest.approx(2 / 6)


def test_runs_of_the_same_strategy_in_the_same_place_and_without_codec_count() -> None:
    slow, fast = run("ddp", LAUNCH_SECONDS + 0.006, 0.012), run("overlap", LAUNCH_SECONDS, 0.010)
    assert costs(slow, fast).contention == pytest.approx(0.0)
    assert costs(slow).contention == pytest.approx(6 / 6)
    assert costs(slow, target=replace(TARGET, link=None)) == OverlapCosts()
    assert costs(run("overlap", 0.008, 0.010, codec="int8")) == OverlapCosts()


def test_predictions_contain_what_runs_show() -> None:
    """Exposed communication of the runs is the same; one has a longer backward pass."""
    steps = []
    for longer in (0.0, 0.004):
        measured = run("overlap", longer, 0.0)
        phases = {**measured.phases, "exchange": 0.05}
        known = replace(calibration(), runs=(replace(measured, phases=phases),))
        target = Target("overlap", 2, 64, link=LINK)
        steps.append(Predictor(known, samples=3).predict(target).step_seconds.median)
    # Runs differ by 4.5%, which is more than launches usually do.
    weight = LAUNCH_DEVIATION**2 / (LAUNCH_DEVIATION**2 + (0.045 * ALONE) ** 2)
    assert steps[1] - steps[0] == pytest.approx(0.004 * weight, rel=0.05)


def test_launches_are_not_usual_on_gpus() -> None:
    """Kernels hide them, unless runs show otherwise."""
    target = replace(TARGET, backend="nccl")
    plain = replace(run("ddp", 0.0, 0.0), backend="nccl")
    assert costs(plain, target=target, deviation=0.1).launch_seconds == 0.0
    longer = replace(run("ddp", 0.001, 0.0), backend="nccl")
    assert costs(longer, target=target).launch_seconds == pytest.approx(0.001)


@pytest.mark.parametrize("is_one_host", [False, True])
def test_a_run_whose_compute_is_slower_has_no_more_launches(is_one_host: bool) -> None:
    """All phases take 1.2 times as long, on one host because workers side by side do."""
    ring = timing("all_reduce", "ring", 1e-3, 100e6, link=None if is_one_host else LINK)
    sharing = (SideBySide(1, (0.01,)), SideBySide(2, (0.012,) * 2)) if is_one_host else ()
    target = Target("overlap", 2, 64, link=None if is_one_host else LINK)
    steps = []
    for factor in (1.0, 1.2):
        phases = {name: factor * spent for name, spent in point(32, 0.042).phases.items()}
        same = run("overlap", 0.0, 0.0)
        same = replace(same, phases={**phases, "exchange": 0.05}, hosts=target.host_count)
        known = replace(
            calibration(collectives=[ring]),
            runs=(replace(same, link=target.link),),
            side_by_side=sharing if factor > 1 else (),
        )
        steps.append(Predictor(known, samples=1).typical_step_seconds(target))
    assert steps[1] - steps[0] == pytest.approx(0.2 * 0.042, rel=0.02)


def test_hooks_of_fsdp_take_longer_in_both_passes() -> None:
    """As in its runs; with NCCL, the passes also contain communication, which is predicted."""
    timings = [
        timing(operation, algorithm, 1e-3, 100e6, backend=backend)
        for backend in ("gloo", "nccl")
        for operation, algorithm in (
            ("all_reduce", "ring"), ("reduce_scatter", "library"), ("all_gather", "library"),
        )
    ]  # fmt: skip
    known, longer = calibration(collectives=timings), {}
    for backend in ("gloo", "nccl"):
        steps = []
        for factor in (1.0, 2.0):
            phases = {name: factor * spent for name, spent in point(32, 0.042).phases.items()}
            same = run("fsdp", 0.0, 0.0)
            same = replace(same, backend=backend, phases={**phases, "exchange": 0.05})
            target = Target("fsdp", 2, 64, link=LINK, backend=backend)
            predictor = Predictor(replace(known, runs=(same,)), samples=1)
            steps.append(predictor.typical_step_seconds(target))
        longer[backend] = steps[1] - steps[0]
    # Runs differ by 4.5%, so what is usual counts a little.
    weight = 1 / (1 + (0.045 * 0.0378 / FSDP_DEVIATION) ** 2)
    assert longer["gloo"] == pytest.approx(0.0378 * weight, rel=0.05)
    assert longer["nccl"] == pytest.approx(0.0)
