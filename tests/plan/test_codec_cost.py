"""Codecs in plans: time by bytes and workers, bytes on the wire, and what overlaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from paceline.errors import ConfigError, MissingMeasurementError
from paceline.plan.calibration import Calibration, CodecTiming, Gradient, MeasuredRun, SizePoint
from paceline.plan.codec_cost import PLANNED_CODECS, codec_cost, plannable_codecs
from paceline.plan.collective_cost import CollectiveTime
from paceline.plan.job import Compute, Job
from paceline.plan.links import Link
from paceline.plan.overlap_simulation import Transfer, simulate_overlap
from paceline.plan.prediction import Interval, Predictor
from paceline.plan.step_simulation import simulate_step
from paceline.plan.strategy_options import own_options
from paceline.plan.target import Target
from tests.support.calibrations import FAST, LINK, calibration

MIB = 2**20
SIZES = (MIB // 16, MIB, 4 * MIB)


def timing(codec: str, workers: int, seconds_per_mib: float, call_seconds: float) -> CodecTiming:
    points = [SizePoint(size, (call_seconds + seconds_per_mib * size / MIB,) * 3) for size in SIZES]
    return CodecTiming(codec, workers, tuple(points))


TIMINGS = tuple(
    timing(codec, workers, 0.01 + per_worker * workers, 1e-3)
    for codec, per_worker in (
        ("bf16", 0.0),
        ("fp16", 0.0),
        ("int8", 0.005),
        ("topk", 0.005),
        ("powersgd", 0.0),
    )
    for workers in (2, 8)
)
GRADIENTS = tuple(Gradient(MIB, ready, (512, 512)) for ready in (1.0, 0.75, 0.5, 0.25))


def job(strategy: str, options: Mapping[str, str], workers: int = 4) -> Job:
    """A second of compute; collectives take a second per 10 MiB, without latency."""

    def collective(_operation: str, _algorithm: str, size_bytes: float) -> CollectiveTime:
        return CollectiveTime(0.0, size_bytes / (10 * MIB))

    return Job(
        strategy, options, workers, workers, GRADIENTS, 0, Compute(0.1, 0.2, 0.6, 0.1), collective,
        codec=codec_cost(options, TIMINGS),
    )  # fmt: skip


def test_time_is_linear_in_bytes_and_workers() -> None:
    cost = codec_cost({"codec": "int8"}, TIMINGS)
    assert cost is not None
    for workers in (2, 4, 8, 16):
        expected = 1e-3 + 2 * (0.01 + 0.005 * workers)
        assert cost.seconds(GRADIENTS[:2], workers) == pytest.approx(expected)
    assert replace(cost, factor=3.0).seconds(GRADIENTS[:1], 2) == pytest.approx(3 * 0.021)


def test_no_codec_costs_nothing() -> None:
    assert codec_cost({}, TIMINGS) is None
    assert codec_cost({"codec": "none"}, ()) is None


def test_an_exchange_encodes_then_sums_or_gathers() -> None:
    """bf16 sums half the bytes; int8 gathers a byte and a scale per chunk from every worker."""
    half = job("ring", {"codec": "bf16"}).reduction("ring", GRADIENTS[:1])
    assert half.busy_seconds == pytest.approx(0.05)
    assert half.codec_seconds == pytest.approx(0.011)
    quarter = job("ring", {"codec": "int8"}).reduction("ring", GRADIENTS[:1])
    gathered = 4 * (MIB / 4 + 4 * MIB / 4 / 1024)
    assert quarter.busy_seconds == pytest.approx(gathered / (10 * MIB))
    assert quarter.codec_seconds == pytest.approx(0.031)
    few = job("ring", {"codec": "topk", "ratio": "0.5"}).reduction("ring", GRADIENTS[:1])
    assert few.busy_seconds == pytest.approx(4 * 0.5 * 2 * MIB / (10 * MIB))


@pytest.mark.parametrize("codec", PLANNED_CODECS)
def test_link_bytes_are_those_of_the_codec(codec: str) -> None:
    one = job("ring", {"codec": codec})
    assert one.codec is not None
    wire = one.codec.wire_bytes(GRADIENTS[:1])
    expected = 2 * 3 / 4 * sum(wire.sums) + 3 * sum(wire.gathers)
    assert one.reduction_bytes("ring", GRADIENTS[:1]) == pytest.approx(expected)


def test_powersgd_sends_two_thin_matrices_for_each_matrix_and_all_of_other_tensors() -> None:
    bias = Gradient(2048, 1.0, (512,))
    one = job("ring", {"codec": "powersgd", "rank": "4"})
    assert one.codec is not None
    wire = one.codec.wire_bytes([GRADIENTS[0], bias])
    assert wire.sums == (4 * 4 * 512 + 2048, 4 * 4 * 512)
    reduction = one.reduction("ring", [*GRADIENTS[:2], bias])
    # Each matrix takes a call; the bias is not compressed.
    assert reduction.codec_seconds == pytest.approx(2 * (0.01 + 1e-3))
    assert reduction.busy_seconds == pytest.approx((4 * 4 * 512 * 4 + 2048) / (10 * MIB))


def test_powersgd_needs_shapes_and_times_of_matrices() -> None:
    unknown = replace(calibration(), codec_timings=TIMINGS)
    target = Target("ring", 4, 64, {"codec": "powersgd"}, link=LINK)
    with pytest.raises(MissingMeasurementError, match="shapes of the model's tensors"):
        Predictor(unknown).predict(target)
    assert "powersgd" not in plannable_codecs(TIMINGS, unknown.gradients)
    assert [*plannable_codecs(TIMINGS, GRADIENTS)] == ["bf16", "fp16", "int8", "topk", "powersgd"]
    vectors = [replace(each, has_matrices=False) for each in TIMINGS]
    assert [*plannable_codecs(vectors, GRADIENTS)] == ["bf16", "fp16", "int8", "topk"]
    with pytest.raises(MissingMeasurementError, match="paceline comm --codecs powersgd"):
        codec_cost({"codec": "powersgd"}, vectors)


@pytest.mark.parametrize("strategy", ["ring", "allreduce", "gather_scatter"])
def test_exposed_exchanges_include_the_codec(strategy: str) -> None:
    """Tensors are encoded one after the other, or all at once in one call."""
    step = simulate_step(job(strategy, {"codec": "bf16"}))
    calls = 1 if strategy == "ring" else 4
    assert step.exchange_seconds == pytest.approx(0.2 + 0.04 + calls * 1e-3)


@pytest.mark.parametrize("strategy", ["overlap", "ddp"])
def test_buckets_are_encoded_during_the_backward_pass_at_its_cost(strategy: str) -> None:
    """Three of four buckets are encoded during the backward pass, which takes as much longer."""
    step = simulate_step(job(strategy, {"bucket_mib": "1", "codec": "bf16"}))
    assert step.seconds == pytest.approx(1.0 + 3 * 0.011 + 0.011 + 0.05)


def test_encoding_and_the_backward_pass_share_the_cores() -> None:
    times = simulate_overlap(1.0, [Transfer(0.5, CollectiveTime(0.0, 0.5, 0.25))], threads=1)
    # Half a second of both at half speed, a quarter alone with the transfer.
    assert times.backward == pytest.approx(1.25)
    assert times.end == pytest.approx(1.5)
    late = simulate_overlap(1.0, [Transfer(1.0, CollectiveTime(0.0, 0.5, 0.25))], threads=1)
    assert late.backward == pytest.approx(1.0)
    assert late.end == pytest.approx(1.75)


def with_codecs(link: Link = LINK) -> Calibration:
    return replace(calibration(link=link), codec_timings=TIMINGS)


def test_a_codec_pays_off_on_a_slow_link_only() -> None:
    known = replace(
        calibration(), codec_timings=tuple(timing("bf16", each, 0.01, 1e-3) for each in (2, 8))
    )
    predictor = Predictor(known)

    def seconds(bandwidth: float, options: Mapping[str, str]) -> float:
        target = Target("ring", 4, 64, options, link=replace(LINK, bits_per_second=bandwidth))
        return predictor.predict(target).step_seconds.median

    assert seconds(1e8, {"codec": "bf16"}) < 0.7 * seconds(1e8, {})
    assert seconds(1e9, {"codec": "bf16"}) > seconds(1e9, {})


def test_runs_without_the_codec_correct_plans_with_it() -> None:
    plain = Target("ring", 2, 64, link=FAST)
    expected = Predictor(calibration(link=FAST)).predict(plain).step_seconds.median
    run = MeasuredRun(
        "ring", {}, "gloo", 2, 2, FAST, 32, 1.5 * expected, {"input": 0.0, "forward": 0.0126}
    )
    target = replace(plain, options={"codec": "bf16"})
    before = Predictor(with_codecs(FAST)).predict(target).step_seconds.median
    slower = Predictor(replace(with_codecs(FAST), runs=(run,))).predict(target).step_seconds.median
    assert slower > 1.15 * before


def test_a_codec_that_was_not_measured_is_named() -> None:
    with pytest.raises(MissingMeasurementError, match="paceline comm --codecs bf16"):
        Predictor(calibration()).predict(Target("ring", 4, 64, {"codec": "bf16"}, link=LINK))


def test_options_of_codecs_are_checked() -> None:
    assert own_options("ring", {"codec": "topk", "ratio": "0.1"}) == {
        "codec": "topk", "ratio": "0.1",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="no plan for 'zip'"):
        own_options("ring", {"codec": "zip"})
    with pytest.raises(ConfigError, match="ratio"):
        own_options("ring", {"codec": "bf16", "ratio": "0.1"})


def test_a_calibration_with_codecs_goes_through_json() -> None:
    assert Calibration.from_dict(with_codecs().to_dict()) == with_codecs()


def test_the_order_of_predictions_changes_none() -> None:
    noisy = [
        replace(
            each,
            points=tuple(
                replace(point, seconds=tuple(factor * point.seconds[0] for factor in (0.8, 1, 1.2)))
                for point in each.points
            ),
        )
        for each in TIMINGS
    ]
    known = replace(calibration(), codec_timings=tuple(noisy))
    targets = [Target("ring", 4, 64, {"codec": codec}, link=LINK) for codec in ("bf16", "int8")]

    def intervals(order: Sequence[Target]) -> dict[str, Interval]:
        predictor = Predictor(known, samples=10)
        return {each.options["codec"]: predictor.predict(each).step_seconds for each in order}

    assert intervals(targets) == intervals(targets[::-1])
