"""Predictions: exact for exact measurements, and intervals that follow the measured variation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from paceline.errors import MissingMeasurementError, NoPredictionError
from paceline.plan import prediction
from paceline.plan.calibration import ComputePoint, MeasuredRun
from paceline.plan.cluster_simulation import Racks
from paceline.plan.compute_times import ComputeTimes, deviation_of_runs
from paceline.plan.corrections import Correction, shrunk_correction
from paceline.plan.host_sharing import HostSharing
from paceline.plan.links import Link
from paceline.plan.prediction import Predictor
from paceline.plan.stragglers import expected_maximum
from paceline.plan.target import Target
from tests.support.calibrations import FAST, LINK, calibration, point, timing


@pytest.fixture
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the error between runs, equal samples leave no uncertainty."""
    monkeypatch.setattr(prediction, "COMPUTE_ERROR", 0.0)
    monkeypatch.setattr(prediction, "COMMUNICATION_ERROR", 0.0)
    monkeypatch.setattr(prediction, "RUN_DEVIATION", 0.0)
    monkeypatch.setattr(prediction, "LEAST_RUN_DEVIATION", 0.0)


def ring_seconds(workers: int, size_bytes: float) -> float:
    """Of timing("all_reduce", "ring", 1e-3, 100e6), whose two rounds take half of the latency each.

    More than two workers transfer at the 110e6 bytes/s of one-way messages.
    """
    rate = 100e6 if workers == 2 else 110e6
    return 2 * (workers - 1) * (0.5e-3 + size_bytes / workers / rate)


def test_fewer_samples_take_at_least_their_share_of_the_time() -> None:
    """Two disturbed measurements, whose line reaches 0 at 24 samples."""
    noisy = replace(calibration(), compute=(point(32, 0.01), point(64, 0.05)))
    times = ComputeTimes(noisy)
    assert times.at(8).seconds == pytest.approx(0.01 * 8 / 32)
    assert times.at(96).seconds == pytest.approx(0.09, rel=0.01)


@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_exact_measurements_give_the_formula(workers: int) -> None:
    found = Predictor(calibration(), samples=5).predict(Target("ring", workers, 64, link=LINK))
    compute = 0.010 + 0.001 * -(-64 // workers)
    exchange = ring_seconds(workers, 4_404_000)
    assert found.step_seconds.median == pytest.approx(compute + exchange, rel=1e-3)
    assert found.step_seconds.low == pytest.approx(found.step_seconds.high)
    assert found.throughput.median == pytest.approx(64 / (compute + exchange), rel=1e-3)
    assert found.exposed_communication.median == pytest.approx(
        exchange / (compute + exchange), rel=1e-3
    )
    assert found.efficiency.median == pytest.approx(
        0.074 / workers / (compute + exchange), rel=1e-3
    )
    assert found.link_bytes == pytest.approx(2 * (workers - 1) / workers * 4_404_000)


def test_compute_times_leave_the_line_only_by_more_than_runs_differ() -> None:
    """A batch that took 5% longer is a disturbed run; a device that is not full is no line."""

    def at_48(*milliseconds: float) -> float:
        points = tuple(map(point, (16, 32, 48, 64), (each / 1e3 for each in milliseconds)))
        return 1e3 * ComputeTimes(replace(calibration(), compute=points)).at(48).seconds

    assert at_48(26, 42, 58 * 1.05, 74) == pytest.approx(58, rel=0.025)
    assert at_48(20, 20, 20, 80) == pytest.approx(20, rel=0.05)


def test_how_much_runs_differ_is_that_of_runs_with_the_same_batch() -> None:
    """If runs with several workers repeat the measured time, 5% more is no disturbance."""
    points = tuple(map(point, (16, 32, 48, 64), (0.026, 0.042, 0.058 * 1.05, 0.074)))

    def at_48(factor: float, runs: int) -> float:
        phases = {name: factor * spent for name, spent in point(32, 0.042).phases.items()}
        run = MeasuredRun("ring", {}, "gloo", 2, 2, LINK, 32, 0.1, phases)
        known = replace(calibration(), compute=points, runs=(run,) * runs)
        return ComputeTimes(known).at(48).seconds

    assert at_48(1.001, runs=4) > at_48(1.1, runs=4) == at_48(1.001, runs=3)
    assert at_48(1.1, runs=4) == pytest.approx(0.058, rel=0.025)


def test_points_made_from_runs_with_several_workers_do_not_confirm_themselves() -> None:
    phases = dict(point(32, 0.042).phases)
    runs = (MeasuredRun("ring", {}, "gloo", 2, 2, LINK, 32, 0.1, phases),) * 4
    alone = point(32, 0.042)

    def deviation(compute: ComputePoint) -> float | None:
        known = replace(calibration(), compute=(compute,), runs=runs)
        return deviation_of_runs(known, HostSharing(known))

    assert deviation(alone) == 0.02
    assert deviation(replace(alone, step_seconds=())) is None


def test_sharing_the_cores_of_a_host_is_no_deviation() -> None:
    """One worker has all cores; two take twice as long."""
    phases = {name: 2 * spent for name, spent in point(32, 0.042).phases.items()}
    runs = (MeasuredRun("ring", {}, "gloo", 2, 1, None, 32, 0.1, phases),) * 4
    known = replace(calibration(), compute=(point(32, 0.042),), runs=runs)
    sharing = replace(known, cores_per_worker=2.0)
    assert deviation_of_runs(sharing, HostSharing(sharing)) == 0.02
    assert deviation_of_runs(known, HostSharing(known)) == pytest.approx(1.48 * math.log(2))
    # The input alone shows no deviation.
    overlapped = tuple(replace(run, strategy="fsdp", backend="nccl") for run in runs)
    fsdp = replace(known, runs=overlapped)
    assert deviation_of_runs(fsdp, HostSharing(fsdp)) is None


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_input_alone_does_not_scale_compute(backend: str) -> None:
    """All other phases of FSDP contain communication, or hooks."""
    compute = ComputePoint(32, {**point(32, 0.042).phases, "input": 1e-4}, (0.042,) * 20)
    phases = {**compute.phases, "input": 1e-3, "forward": 1.2 * 0.0126, "exchange": 0.05}
    run = MeasuredRun("fsdp", {}, backend, 2, 2, LINK, 32, 0.1, phases)
    timings = [
        timing(operation, algorithm, 1e-3, 100e6, backend=backend)
        for operation, algorithm in (
            ("all_reduce", "ring"), ("reduce_scatter", "library"), ("all_gather", "library"),
        )
    ]  # fmt: skip
    known = replace(calibration(collectives=timings), compute=(compute,))
    target = Target("single", 1, 32, backend=backend)
    ring = Target("ring", 2, 64, link=LINK, backend=backend)
    steps = [
        Predictor(replace(known, runs=runs), samples=1).predict(replace(ring, options={}))
        for runs in ((), (run,))
    ]
    alone = Predictor(known, samples=1).typical_step_seconds(target)
    of_compute = [
        each.step_seconds.median * (1 - each.exposed_communication.median) for each in steps
    ]
    assert of_compute[0] == pytest.approx(alone)
    assert of_compute[1] == pytest.approx(alone)


def test_shared_weights_correct_no_other_strategy_and_no_other_strategy_corrects_them() -> None:
    phases = {**point(32, 0.042).phases, "exchange": 0.2}
    shm = [timing("all_reduce", "library", 1e-3, 100e6, link=None, backend="shm")]
    known = calibration(collectives=shm)
    for measured, planned in (("shared", "allreduce"), ("allreduce", "shared")):
        run = MeasuredRun(measured, {}, "shm", 2, 1, None, 32, 0.25, phases)
        target = Target(planned, 2, 64, backend="shm")
        with_run, without = (
            Predictor(replace(known, runs=runs), samples=1).typical_step_seconds(target)
            for runs in ((run,), ())
        )
        assert with_run == pytest.approx(without)


def test_runs_that_the_model_does_not_predict_correct_nothing() -> None:
    """`shared` on several hosts has no prediction, but other strategies have."""
    phases = {**point(32, 0.042).phases, "exchange": 0.05}
    run = MeasuredRun("shared", {}, "gloo", 2, 2, LINK, 32, 0.1, phases)
    target = Target("ring", 4, 64, link=LINK)
    with_run, without = (
        Predictor(replace(calibration(), runs=runs), samples=1).typical_step_seconds(target)
        for runs in ((run,), ())
    )
    assert with_run == pytest.approx(without)


def test_more_samples_never_take_less_time() -> None:
    """A disturbed measurement of a small batch must not make larger ones look faster."""
    noisy = replace(calibration(), compute=(point(16, 0.05), point(32, 0.03), point(64, 0.074)))
    times = ComputeTimes(noisy)
    assert [times.at(samples).seconds for samples in (16, 32)] == pytest.approx(
        [0.04, 0.04], rel=0.01
    )
    assert times.at(64).seconds == pytest.approx(0.074, rel=0.01)
    assert times.at(48).seconds == pytest.approx(0.057, rel=0.01)


@pytest.mark.usefixtures("_exact")
def test_weak_scaling_compares_with_one_worker_of_the_local_batch() -> None:
    predictor = Predictor(calibration(), samples=5)
    found = predictor.predict(Target("ring", 4, 64, link=LINK, scaling="weak"))
    assert found.efficiency.median == pytest.approx(0.026 / found.step_seconds.median)


def test_intervals_widen_with_the_measured_variation() -> None:
    def width(factors: tuple[float, ...]) -> float:
        noisy = replace(
            timing("all_reduce", "ring", 1e-3, 100e6),
            points=tuple(
                replace(each, seconds=tuple(each.seconds[0] * factor for factor in factors))
                for each in timing("all_reduce", "ring", 1e-3, 100e6).points
            ),
        )
        found = Predictor(calibration(collectives=[noisy])).predict(
            Target("ring", 8, 128, link=LINK)
        )
        assert found.step_seconds.low <= found.step_seconds.median <= found.step_seconds.high
        return found.step_seconds.high - found.step_seconds.low

    assert width((0.7, 0.8, 1.0, 1.3, 1.5)) > 1.2 * width((1.0,) * 5)


def test_predictions_are_reproducible() -> None:
    target = Target("ddp", 8, 128, link=LINK)
    first, second = (Predictor(calibration()).predict(target) for _ in range(2))
    assert first == second


@pytest.mark.usefixtures("_exact")
def test_a_run_of_the_same_strategy_corrects_its_communication() -> None:
    run = MeasuredRun(
        "ring", {}, "gloo", 2, 2, FAST, 32,
        step_seconds=0.042 + 1.5 * ring_seconds(2, 4_404_000),
        phases=dict(point(32, 0.042).phases),
    )  # fmt: skip
    corrected = Predictor(replace(calibration(link=FAST), runs=(run,)), samples=3)
    found = corrected.predict(Target("ring", 4, 64, link=FAST)).step_seconds.median
    assert found == pytest.approx(0.026 + 1.5 * ring_seconds(4, 4_404_000), rel=1e-3)
    # Nor does another bucket size change what is specific to the strategy.
    other = corrected.predict(Target("ring", 4, 64, {"first_bucket_mib": "1"}, link=FAST))
    assert other.step_seconds.median == pytest.approx(found)


@pytest.mark.usefixtures("_exact")
def test_a_correction_does_not_make_the_link_slower() -> None:
    """Software takes 5 ms longer than with two workers alone; the bytes of the link do not."""
    exchange = ring_seconds(2, 4_404_000)
    phases = {**point(32, 0.042).phases, "exchange": exchange + 5e-3, "wait": 0.0}
    run = MeasuredRun("ring", {}, "gloo", 2, 2, LINK, 32, 0.1, phases)
    found = Predictor(replace(calibration(), runs=(run,)), samples=3)
    link = 4_404_000 / 125e6
    factor = (exchange + 5e-3 - link) / (exchange - link)
    expected = 1.5 * link + factor * (ring_seconds(4, 4_404_000) - 1.5 * link)
    step = found.predict(Target("ring", 4, 64, link=LINK)).step_seconds.median
    assert step == pytest.approx(0.026 + expected, rel=1e-3)


@pytest.mark.usefixtures("_exact")
def test_longer_waits_than_stragglers_cause_are_communication() -> None:
    """Workers without variation wait for each other only because of communication."""
    exchange = ring_seconds(2, 4_404_000)
    phases = {**point(32, 0.042).phases, "exchange": exchange, "wait": 5e-3}
    waiting = MeasuredRun("sharded", {}, "gloo", 2, 2, FAST, 32, 0.1, phases)
    others = [replace(waiting, strategy=name, phases={**phases, "wait": 0.0}) for name in "ab"]
    known = calibration(link=FAST)
    target = Target("sharded", 2, 64, link=FAST)
    without, found = (
        Predictor(replace(known, runs=(run, *others)), samples=3)
        .predict(target)
        .step_seconds.median
        for run in (replace(waiting, phases={**phases, "wait": 0.0}), waiting)
    )
    assert found - without == pytest.approx(5e-3, rel=0.01)


@pytest.mark.usefixtures("_exact")
def test_faster_concurrent_collectives_have_less_software() -> None:
    """All of a collective's time is software if the link is fast: a quarter of it is left."""
    known = calibration(link=FAST)
    target = Target("allreduce", 2, 64, link=FAST)
    plain = Predictor(known, samples=3).predict(target).step_seconds.median - 0.042
    phases = {**point(32, 0.042).phases, "exchange": plain / 4, "wait": 0.0}
    run = MeasuredRun("allreduce", {}, "gloo", 2, 2, FAST, 32, 0.1, phases)
    found = Predictor(replace(known, runs=(run,)), samples=3).predict(target).step_seconds.median
    assert found - 0.042 == pytest.approx(plain / 4, rel=0.01)


def test_intervals_are_as_wide_as_runs_of_the_calibration_differ() -> None:
    def width(*factors: float) -> float:
        runs = [
            MeasuredRun("ring", {}, "gloo", 2, 2, LINK, 32, 0.1, {
                name: factor * spent for name, spent in point(32, 0.042).phases.items()
            })
            for factor in factors
        ]  # fmt: skip
        known = replace(calibration(), runs=tuple(runs))
        step = Predictor(known).predict(Target("single", 1, 32)).step_seconds
        return (step.high - step.low) / step.median

    assert width(0.85, 0.95, 1.05, 1.15) > 2 * width(0.99, 1.0, 1.0, 1.01)
    # An interval of 80% has 2 x 1.28 standard deviations of both errors.
    both = math.hypot(prediction.COMPUTE_ERROR, prediction.LEAST_RUN_DEVIATION)
    assert width(1.0, 1.0, 1.0, 1.0) == pytest.approx(2.56 * both, rel=0.15)


def test_strategies_without_runs_are_corrected_like_others_but_less_surely() -> None:
    run = MeasuredRun(
        "ring", {}, "gloo", 2, 2, FAST, 32,
        step_seconds=0.042 + 1.5 * ring_seconds(2, 4_404_000),
        phases=dict(point(32, 0.042).phases),
    )  # fmt: skip
    target = Target("tree", 4, 64, link=FAST)
    plain = Predictor(calibration(link=FAST)).predict(target).step_seconds
    corrected = Predictor(replace(calibration(link=FAST), runs=(run,))).predict(target).step_seconds
    assert corrected.median - 0.026 == pytest.approx(1.5 * (plain.median - 0.026), rel=0.05)
    assert corrected.high - corrected.low > 1.1 * 1.5 * (plain.high - plain.low)


@pytest.mark.usefixtures("_exact")
def test_slower_compute_in_distributed_runs_applies_to_predictions() -> None:
    phases = {name: 1.2 * spent for name, spent in point(32, 0.042).phases.items()}
    exchange = ring_seconds(2, 4_404_000)
    run = MeasuredRun("ring", {}, "gloo", 2, 2, LINK, 32, 1.2 * 0.042 + exchange, phases)
    found = Predictor(replace(calibration(), runs=(run,)), samples=3)
    step = found.predict(Target("ring", 4, 64, link=LINK)).step_seconds.median
    assert step == pytest.approx(1.2 * 0.026 + ring_seconds(4, 4_404_000), rel=1e-3)


@pytest.mark.usefixtures("_exact")
def test_runs_on_one_host_reproduce_themselves() -> None:
    """Workers that share cores are slower: in the run, and so not once more in its prediction."""
    phases = {name: 2 * spent for name, spent in point(32, 0.042).phases.items()}
    step = 2 * 0.042 + ring_seconds(2, 4_404_000)
    run = MeasuredRun("ring", {}, "gloo", 2, 1, None, 32, step, phases)
    shared = replace(
        calibration(collectives=[timing("all_reduce", "ring", 1e-3, 100e6, link=None)]),
        cores_per_worker=2.0,
        runs=(run,),
    )
    found = Predictor(shared, samples=3).predict(Target("ring", 2, 64))
    assert found.step_seconds.median == pytest.approx(step, rel=1e-3)


@pytest.mark.usefixtures("_exact")
def test_collectives_of_other_backends_do_not_count() -> None:
    gloo = timing("all_reduce", "library", 1e-3, 100e6)
    nccl = timing("all_reduce", "library", 1e-5, 10e9, backend="nccl")
    steps = [
        Predictor(calibration(collectives=order), samples=3)
        .predict(Target("ddp", 4, 64, link=LINK, backend=backend))
        .step_seconds.median
        for backend in ("gloo", "nccl")
        for order in ([gloo, nccl], [nccl, gloo])
    ]
    assert steps[0] == steps[1] > 2 * steps[2]
    assert steps[2] == steps[3]


@pytest.mark.usefixtures("_exact")
def test_workers_that_are_slow_together_wait_less() -> None:
    varied = (0.5, 1.5) * 10
    independent = replace(calibration(), residuals=(varied,))
    wait = 0.25 * 0.25 * 0.042
    phases = {**point(32, 0.042).phases, "wait": wait}
    step = 0.042 + wait + ring_seconds(2, 4_404_000)
    run = MeasuredRun("ring", {}, "gloo", 2, 2, LINK, 32, step, phases)
    together = replace(independent, runs=(run,))
    target = Target("ring", 2, 64, link=LINK)
    seconds = [
        Predictor(each, samples=200).predict(target).step_seconds.median
        for each in (calibration(), independent, together)
    ]
    # Of two independent workers, the slower one takes a quarter longer than the mean.
    assert seconds[1] - seconds[0] == pytest.approx(0.25 * 0.042, rel=0.1)
    assert seconds[2] - seconds[0] == pytest.approx(0.25 * 0.25 * 0.042, rel=0.1)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (Target("ring", 4, 64, link=LINK), None),
        (Target("ring", 16, 256, link=LINK), "16 workers, measured 2"),
        (Target("ring", 2, 1000, link=LINK), "500 samples per worker, measured 16 to 64"),
        (Target("ring", 4, 64, link=replace(LINK, bits_per_second=1e8)), "link 100mbit, measured"),
    ],
)
def test_predictions_outside_of_the_measurements_say_so(target: Target, reason: str | None) -> None:
    found = Predictor(calibration(), samples=3).predict(target)
    assert found.to_dict()["extrapolated"] is (reason is not None)
    assert reason is None or reason in found.extrapolated[0]


@pytest.mark.parametrize(
    ("strategy", "bytes_of_weights"),
    [
        # Weights, gradients and momentum.
        ("ring", 3.0),
        ("local_sgd", 3.0),
        # A quarter of the momentum.
        ("sharded", 2.25),
        # Buckets of gradients are a copy.
        ("ddp", 4.0),
        # The servers update.
        ("parameter_server", 2.0),
        # One copy of the weights and of the momentum for all four.
        ("shared", 1.5),
        # A quarter of everything, and the weights and gradients of the largest layer.
        ("fsdp", 0.75 + 2 * 4_004_000 / 4_404_000),
    ],
)
def test_memory_is_that_of_the_strategy(strategy: str, bytes_of_weights: float) -> None:
    sizes = (400_000, 4_000_000, 4_000)
    within = [
        timing("all_reduce", "ring", 1e-3, 1e8, link=None, backend=each) for each in ("gloo", "shm")
    ]
    weights = sum(sizes)
    known = replace(
        calibration(sizes, within), activation_bytes_per_sample=1e3, optimizer_state_bytes=weights
    )
    backend = "shm" if strategy == "shared" else "gloo"
    found = Predictor(known, samples=1).predict(Target(strategy, 4, 64, backend=backend))
    assert found.memory_bytes == pytest.approx(bytes_of_weights * weights + 16 * 1e3)


def test_impossible_targets_are_rejected() -> None:
    predictor = Predictor(calibration(), samples=1)
    for target, message in (
        (Target("ring", 8, 4, link=LINK), "a batch of 4 has no sample for some of 8 workers"),
        (Target("ring", 3, 64, hosts=2, link=LINK), "3 workers cannot share 2 hosts equally"),
        (Target("ring", 4, 64, hosts=2, link=LINK, backend="hierarchical", racks=Racks(1, 2.0)),
         "--racks: no plan for --communicator hierarchical"),
    ):  # fmt: skip
        with pytest.raises(NoPredictionError, match=message):
            predictor.predict(target)
        with pytest.raises(NoPredictionError, match=message):
            predictor.typical_step_seconds(target)


def test_what_was_not_measured_is_named() -> None:
    with pytest.raises(MissingMeasurementError, match="add `paceline comm"):
        Predictor(calibration(collectives=[])).predict(Target("ring", 4, 64))
    on_one_host = calibration(collectives=[timing("all_reduce", "ring", 1e-3, 1e8, link=None)])
    with pytest.raises(MissingMeasurementError, match=r"two workers on two hosts, .* --link"):
        Predictor(on_one_host).predict(Target("ring", 4, 64, hosts=2))
    one_point = replace(calibration(), compute=(point(16, 0.026),))
    with pytest.raises(MissingMeasurementError, match="other batches than 16 samples"):
        Predictor(one_point).predict(Target("ring", 4, 128, link=LINK))


def test_the_expected_maximum_is_that_of_resampled_workers() -> None:
    random = np.random.default_rng(3)
    residuals = random.lognormal(0.0, 0.3, 400)
    residuals /= residuals.mean()
    for workers in (1, 2, 8, 64):
        drawn = random.choice(residuals, (20_000, workers)).max(axis=1).mean()
        assert expected_maximum(residuals, workers) == pytest.approx(drawn, rel=0.02)
    drawn = random.choice(residuals, (20_000, 4))
    drawn[:, 0] *= 1.5
    expected = drawn.max(axis=1).mean()
    assert expected_maximum(residuals, 4, slowdown=1.5) == pytest.approx(expected, rel=0.02)


@pytest.mark.usefixtures("_exact")
def test_a_slow_asynchronous_worker_does_not_slow_the_others() -> None:
    """Three of four workers compute as before, so the job loses at most the fourth."""

    def seconds(mode: str, slowdown: float) -> float:
        target = Target(
            "parameter_server", 4, 256, {"mode": mode}, link=Link(100e9), slowdown=slowdown
        )
        return Predictor(calibration(), samples=3).predict(target).step_seconds.median

    compute = 0.9 * 0.074
    assert seconds("sync", 4.0) - seconds("sync", 1.0) == pytest.approx(3 * compute)
    for mode in ("async", "bounded"):
        longer = seconds(mode, 4.0) - seconds(mode, 1.0)
        assert longer == pytest.approx((4 / 3.25 - 1) * compute, rel=0.1)


def test_workers_that_synchronize_rarely_wait_less() -> None:
    residuals = np.random.default_rng(3).lognormal(0.0, 0.3, 400)
    residuals /= residuals.mean()
    every_step, rarely = (expected_maximum(residuals, 8, steps=steps) for steps in (1, 8))
    assert 1.0 < rarely < every_step


def test_a_run_that_varies_makes_its_correction_uncertain() -> None:
    def width(deviation: float) -> float:
        run = MeasuredRun(
            "ring", {}, "gloo", 2, 2, FAST, 32,
            step_seconds=0.042 + ring_seconds(2, 4_404_000),
            phases=dict(point(32, 0.042).phases),
            deviation=deviation,
        )  # fmt: skip
        found = Predictor(replace(calibration(link=FAST), runs=(run,))).predict(
            Target("ring", 4, 64, link=FAST)
        )
        return found.step_seconds.high - found.step_seconds.low

    assert width(0.3) > 1.2 * width(0.0)


def test_a_run_that_says_nothing_about_software_has_no_correction_of_its_own() -> None:
    """On a slow link, software is a small part of the exchange, and noise looks like much of it."""
    telling = [Correction(factor, 0.05) for factor in (1.1, 1.2, 1.2, 1.3, 3.0)]
    vague = Correction(4.0, 5.0)
    assert shrunk_correction([vague], [*telling, vague]).factor == pytest.approx(1.0, abs=0.02)
    assert shrunk_correction(telling[-1:], [*telling, vague]).factor > 2.0
