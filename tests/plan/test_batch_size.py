"""Recommended batch sizes: time to a loss from the gradient noise scale and the step time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.analysis.run import open_run
from paceline.cli import main
from paceline.measure.noise_scale import NoiseSample
from paceline.plan.advice import advise
from paceline.plan.calibration import Calibration
from paceline.plan.learning import Learning, learning_of
from paceline.plan.links import Link
from paceline.plan.target import Target
from paceline.records import write_json
from tests.support.calibrations import calibration
from tests.support.records import FakeRun, add_noise_samples, write_run

SINGLE = Target("single", 1, 64)
LEARNING = Learning(
    noise_scale=640.0, batch_size=64, low=160.0, high=2560.0, steps=1000, learning_rate=0.01
)


def noisy(learning: Learning = LEARNING) -> Calibration:
    """A step takes 10 ms plus 1 ms per sample."""
    return replace(calibration(), learning=learning)


@pytest.mark.parametrize(("noise_scale", "batch"), [(6.4, 8), (640.0, 80), (1e5, 1000)])
def test_the_batch_minimizes_steps_times_step_time(noise_scale: float, batch: float) -> None:
    """(1 + N / B) (10 + B) is lowest at B = sqrt(10 N); batch sizes double."""
    found = advise(noisy(replace(LEARNING, noise_scale=noise_scale)), [SINGLE]).best.target.samples
    assert batch == pytest.approx(math.sqrt(10 * noise_scale), rel=0.01)
    assert batch / math.sqrt(2.1) < found < batch * math.sqrt(2.1)


def test_the_advice_has_steps_time_and_learning_rate() -> None:
    found = advise(noisy(), [SINGLE])
    advice = found.batch
    assert advice is not None
    assert advice.seconds is not None
    assert advice.steps is not None
    assert advice.steps == pytest.approx(1000 * (1 + 640 / advice.batch_size) / 11)
    assert advice.seconds.median == pytest.approx(
        advice.steps * found.best.step_seconds.median, rel=1e-6
    )
    assert advice.seconds.low < advice.seconds.median < advice.seconds.high
    factor = 11 / (1 + 640 / advice.batch_size)
    assert advice.learning_rate == pytest.approx(0.01 * factor)
    assert f"--lr {0.01 * factor:.3g}" in found.command
    assert found.to_dict()["batch"]["learning"]["noise_scale"] == 640


def test_the_interval_of_the_noise_scale_gives_a_range_of_batches() -> None:
    wide = advise(noisy(), [SINGLE]).batch
    assert wide is not None
    low, high = wide.batch_range
    assert (low, high) == (32, 128)
    exact = advise(noisy(replace(LEARNING, low=640.0, high=640.0)), [SINGLE]).batch
    assert exact is not None
    assert exact.batch_range == (exact.batch_size, exact.batch_size)
    unlimited = advise(noisy(replace(LEARNING, high=None)), [SINGLE]).batch
    assert unlimited is not None
    # All batches need the same samples, which take the least time in the largest batch.
    assert unlimited.batch_range[1] == 32 * 64


def test_more_workers_pay_off_with_larger_batches() -> None:
    """The batch is chosen together with the number of workers, by time or by cost."""
    fast = Link(100e9)
    targets = [Target("single", 1, 64)]
    targets += [Target("ring", workers, 64, link=fast) for workers in (2, 8)]
    by_time = advise(noisy(replace(LEARNING, noise_scale=1e4)), targets).best.target
    assert by_time.workers == 8
    alone = advise(noisy(replace(LEARNING, noise_scale=1e4)), [SINGLE]).best.target
    assert by_time.samples > alone.samples
    by_cost = advise(noisy(replace(LEARNING, noise_scale=1e4)), targets, 2.0).best.target
    assert by_cost.workers == 1


def test_a_batch_of_each_worker_is_kept() -> None:
    found = advise(noisy(), [replace(SINGLE, scaling="weak")])
    assert found.best.target.samples == 64
    assert found.batch is None


def write_learned(root: Path, name: str, scale: float, measurements: int, batch: int) -> Path:
    path = write_run(root, FakeRun(name, {"batch_size": batch, "lr": 0.02}))
    small = batch / 2
    add_noise_samples(
        path,
        [
            NoiseSample(step, small, batch, 1 + scale / small, 1 + scale / batch)
            for step in range(measurements)
        ],
    )
    return path


def test_the_run_with_the_most_measurements_counts(tmp_path: Path) -> None:
    short = open_run(write_learned(tmp_path, "short", 50.0, 4, 256))
    long = open_run(write_learned(tmp_path, "long", 300.0, 40, 32))
    found = learning_of([short, long])
    assert found is not None
    assert found.noise_scale == pytest.approx(300)
    assert (found.batch_size, found.learning_rate, found.steps) == (32, 0.02, long.iterations)
    assert learning_of([open_run(write_run(tmp_path, FakeRun("unmeasured")))]) is None


def test_the_terminal_shows_range_rule_and_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    noisy().write(path)
    assert Calibration.read(path).learning == LEARNING
    assert main(["plan", str(path), "--workers", "1", "--advise"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "640 samples (95% interval 160 to 2,560), measured at batch size 64" in text
    assert "0.01 x (1 + N / 64) / (1 + N / batch)" in text
    assert "the best batch is 32 to 128" in text
    assert "run_branches" in text
    assert main(["plan", str(path), "--workers", "1", "--price-per-worker-hour", "3600"]) == 0
    advice = advise(noisy(), [SINGLE], 3600.0).batch
    assert advice is not None
    assert advice.seconds is not None
    assert f"at a cost of {advice.seconds.median:,.3g}" in " ".join(capsys.readouterr().out.split())


def test_a_noise_scale_without_an_interval_says_what_to_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few steps at the start of training are no reason to change the batch or the rate."""
    path, out = tmp_path / "calibration.json", tmp_path / "plan.json"
    noisy(replace(LEARNING, low=None, high=None)).write(path)
    assert main(["plan", str(path), "--workers", "1", "--advise", f"--json={out}"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    note = "Batch sizes were not compared: no run shows the gradient noise scale with an interval,"
    assert f"{note} which takes at least 8 measured steps (--noise-every)." in text
    assert "--batch-size 64 " in text
    assert "--lr" not in text
    advice = json.loads(out.read_text())["advice"]
    assert (advice["best"]["batch_size"], advice["batch"]) == (64, None)
    # With a fixed batch of each worker, and for scripts, there is nothing to compare.
    assert main(["plan", str(path), "--workers", "1", "--advise", "--scaling", "weak"]) == 0
    assert "not compared" not in capsys.readouterr().out
    noisy(replace(LEARNING, low=None, high=None)).write(path)
    write_json(path, {**json.loads(path.read_text()), "script": "train.py"})
    assert main(["plan", str(path), "--workers", "1", "--advise"]) == 0
    assert "not compared" not in capsys.readouterr().out


def test_the_rule_for_the_learning_rate_names_the_optimizer_it_is_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    noisy(replace(LEARNING, optimizer=None)).write(path)
    assert main(["plan", str(path), "--workers", "1", "--advise"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "with SGD, the square root of that with Adam" in text
    assert "Batch sizes were not compared" not in text


def test_a_former_calibration_keeps_its_noise_scale(tmp_path: Path) -> None:
    record = calibration().to_dict()
    del record["learning"]
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({**record, "noise_scale": 100.0, "learning_batch_size": 32}))
    assert Calibration.read(path).learning == Learning(100.0, 32)
