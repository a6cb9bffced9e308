"""Recommendations: the best of all candidates, and what they are compared by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.config import RunConfig
from paceline.plan.advice import advise, command
from paceline.plan.calibration import Calibration, CodecTiming, SizePoint
from paceline.plan.links import Link
from paceline.plan.option_variants import EXACT_STRATEGIES, option_variants
from paceline.plan.prediction import Predictor
from paceline.plan.target import Target
from paceline.report.wording.plan import recommendation_text, runner_up_texts
from tests.plan.test_run_calibration import comm_record, write
from tests.support.calibrations import LINK, calibration, timing

WORKERS = (1, 2, 4, 8)


def targets(samples: int = 64, link: Link = LINK) -> list[Target]:
    return [
        Target(name if workers > 1 else "single", workers, samples, link=link)
        for workers in WORKERS
        for name in EXACT_STRATEGIES
    ]


def test_the_fastest_candidate_is_recommended() -> None:
    found = advise(calibration(), targets())
    predictor = Predictor(calibration())
    fastest = max(predictor.predict(each).throughput.median for each in targets())
    assert found.best.throughput.median >= 0.98 * fastest
    assert [more for _, more in found.runners_up] == sorted(more for _, more in found.runners_up)
    assert all(more >= -0.03 for _, more in found.runners_up)


def test_a_slow_link_is_left_to_one_worker() -> None:
    slow = advise(calibration(), targets(link=Link(1e6)))
    assert slow.best.target.workers == 1
    assert slow.limit == "compute"
    fast = advise(calibration(), targets(samples=512, link=Link(100e9)))
    assert fast.best.target.workers == 8


def test_cost_prefers_fewer_workers_than_time() -> None:
    by_time = advise(calibration(), targets(512, Link(100e9)))
    by_cost = advise(calibration(), targets(512, Link(100e9)), price_per_worker_hour=2.0)
    assert by_cost.best.target.workers < by_time.best.target.workers
    assert by_cost.to_dict()["by"] == "cost"


def test_without_a_noise_scale_the_batch_stays() -> None:
    assert advise(calibration(), targets()).best.target.samples == 64


def with_codec(seconds_per_byte: float) -> Calibration:
    points = tuple(SizePoint(size, (seconds_per_byte * size,) * 3) for size in (2**16, 2**22))
    return replace(calibration(), codec_timings=(CodecTiming("bf16", 2, points),))


def test_a_codec_is_an_extra_recommendation() -> None:
    """The recommendation itself computes what one worker computes."""
    slow = [each for each in targets(512, Link(1e8)) if each.workers == 8]
    found = advise(with_codec(1e-9), slow)
    assert found.best == advise(calibration(), slow).best
    assert found.codec is not None
    prediction, saving = found.codec
    assert prediction.target.options == {"codec": "bf16"}
    assert 0.2 < saving < 0.5
    expected = 1 - prediction.step_seconds.median / found.best.step_seconds.median
    assert saving == pytest.approx(expected, abs=0.03)
    assert found.to_dict()["codec"]["saving"] == saving
    assert advise(with_codec(1e-6), slow).codec is None


def test_a_codec_that_was_asked_for_is_recommended() -> None:
    target = Target("ring", 8, 512, {"codec": "bf16"}, link=LINK)
    found = advise(with_codec(1e-9), [target])
    assert found.best.target == target
    assert "-o codec=bf16" in found.command


def test_a_codec_that_was_asked_for_is_not_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither by strategies without codecs, nor because others compute what one worker does."""
    path, out = tmp_path / "calibration.json", tmp_path / "plan.json"
    with_codec(1e-9).write(path)
    wanted = ["--workers=1,8", "--link=100mbit", "--batch-size=512", "-o", "codec=bf16"]
    assert main(["plan", str(path), *wanted, "--advise", f"--json={out}"]) == 0
    advice = json.loads(out.read_text())["advice"]
    assert advice["best"]["options"] == {"codec": "bf16"}
    assert "-o codec=bf16" in advice["command"]
    for other in advice["runners_up"]:
        assert other["workers"] == 1 or other["options"] == {"codec": "bf16"}


def test_codecs_of_the_runs_are_not_recommended_unless_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "one-16", 1, 16)
    write(tmp_path, "one-64", 1, 64)
    write(tmp_path, "two", 2, 64, strategy="overlap", options={"codec": "bf16"})
    comm_record(tmp_path / "comm.json")
    out = tmp_path / "plan.json"
    arguments = ["--workers=2", "--advise", f"--json={out}"]
    assert main(["plan", str(tmp_path), *arguments]) == 0
    advice = json.loads(out.read_text())["advice"]
    candidates = [advice["best"], *advice["runners_up"]]
    assert not any("codec" in each["options"] for each in candidates)
    assert "overlap" in {each["strategy"] for each in candidates}


def test_workers_without_a_sample_are_no_candidates() -> None:
    few = [Target("ring", workers, 4, link=Link(100e9)) for workers in (2, 8)]
    found = advise(calibration(), few)
    assert found.best.target.workers == 2
    assert found.runners_up == []


def test_options_that_are_hardly_faster_are_as_fast() -> None:
    """The default is recommended, and nothing takes negative time more."""
    found = advise(calibration(), targets())
    runners_up = [(found.best, excess) for excess in (-0.03, -0.004, 0.004, 0.12)]
    texts = runner_up_texts(replace(found, runners_up=runners_up))
    amounts = [text.partition(" time: ")[0] for text in texts]
    assert amounts == ["3% less", "as much", "as much", "12% more"]


def test_algorithms_that_were_not_measured_must_be_clearly_faster() -> None:
    """By fewer rounds, halving and doubling takes about 3% less time than a ring of 8 workers."""
    candidates = [Target(name, 8, 64, link=LINK) for name in ("ring", "halving_doubling")]

    def recommended(*measured: str) -> str:
        known = [timing("all_reduce", algorithm, 0.66e-3, 100e6) for algorithm in measured]
        return advise(calibration(collectives=known), candidates).best.target.strategy

    assert recommended("ring") == "ring"
    assert recommended("ring", "halving_doubling") == "halving_doubling"


def test_the_recommendation_names_the_link() -> None:
    target = Target("ring", 8, 64, link=Link(1e9, 1e-4))
    assert "batch 64, link 1gbit,100us: " in recommendation_text(advise(calibration(), [target]))


def test_bucket_sizes_below_the_size_of_the_model_are_compared() -> None:
    known = calibration()  # 4.2 MiB
    variants = [dict(each) for each in option_variants(known, Target("ddp", 8, 64, link=LINK))]
    assert variants == [{}, {"bucket_mib": "0.25"}, {"bucket_mib": "1"}]
    chosen = Target("ddp", 8, 64, {"bucket_mib": "4"}, link=LINK)
    assert [*option_variants(known, chosen)] == [chosen.options]


def test_the_command_repeats_the_settings_of_the_runs() -> None:
    settings = {"data": "mnist", "model_options": {"width": "2"}, "optimizer": "adamw"}
    words = command(replace(calibration(), settings=settings), Target("ring", 2, 64))
    assert "--model lenet --data mnist --model-options width=2 --optimizer adamw" in words


def test_the_command_has_the_cluster_with_the_link_of_the_target() -> None:
    clusters = ("cpus=1,bandwidth=1gbit", "cpus=1,bandwidth=100mbit,latency=1ms")
    known = replace(calibration(), clusters=clusters)
    slow, other = (
        command(known, Target("ring", 4, 64, link=link)) for link in (Link(1e8, 1e-3), Link(1e10))
    )
    assert "--cluster nodes=4,cpus=1,bandwidth=100mbit,latency=1ms" in slow
    assert "--cluster" not in other
    assert "--nnodes 4" in other


def test_the_command_has_the_communicator_of_the_runs() -> None:
    for backend, strategy, has_flag in (
        ("gloo", "ring", False), ("shm", "ring", True), ("shm", "shared", False),
    ):  # fmt: skip
        target = Target(strategy, 2, 64, backend=backend)
        assert ("--communicator hierarchical" in command(calibration(), target)) is has_flag


def test_the_command_has_flags_that_exist() -> None:
    target = Target("ddp", 8, 64, {"bucket_mib": "8"}, hosts=4, link=LINK)
    words = command(calibration(), target).split()
    assert words[:2] == ["paceline", "train"]
    flags = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    assert flags <= set(RunConfig.__dataclass_fields__)
    assert "--nnodes 4 --nproc-per-node 2" in " ".join(words)


def test_the_command_prints_the_recommendation_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "calibration.json", tmp_path / "plan.json"
    complete: Calibration = calibration()
    complete.write(path)
    assert main(["plan", str(path), "--workers", "1,2,4", "--advise", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.strip().startswith("Recommendation")
    assert printed.index("paceline train --model lenet") < printed.index("workers strategy")
    record = json.loads(out.read_text())["advice"]
    assert record["by"] == "time"
    assert record["best"]["throughput"]["median"] > 0
    assert main(["plan", str(path), "--price-per-worker-hour", "3"]) == 0
    assert "per million samples" in capsys.readouterr().out


def test_the_command_warns_that_a_codec_changes_the_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    with_codec(1e-9).write(path)
    wanted = ["--workers", "8", "--link", "100mbit", "--strategy", "ring", "--advise"]
    assert main(["plan", str(path), *wanted]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "less time: ring, codec=bf16, 8 workers, batch 64, which changes the gradients" in printed
    )
    assert "--strategy ring --batch-size 64" in printed
