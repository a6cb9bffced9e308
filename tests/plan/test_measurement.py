"""`paceline plan --model NAME`: measures a job in short runs, then plans it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli import plan as cli_plan
from paceline.plan import measurement
from paceline.plan.run_calibration import calibrate


def test_a_job_is_measured_and_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "RUN_SECONDS", 1e-6)
    monkeypatch.setattr(measurement, "COMM", {**measurement.COMM, "sizes": "1k,64k,1m"})
    monkeypatch.setattr(measurement, "hardware", lambda: {"cores": 2, "gpus": []})
    out, file = tmp_path / "runs", tmp_path / "plan.json"
    job = ["--model=softmax", "--data=plain_digits", "--batch-size=48", "--workers=1,2,4"]
    wanted = ["--strategy=ring", "-o", "codec=bf16", "--threads=2"]
    assert main(["plan", *job, *wanted, f"--out={out}", f"--json={file}"]) == 0

    found = calibrate([str(out)])
    assert [point.samples for point in found.compute] == [12, 24, 48]
    assert {(run.strategy, run.workers) for run in found.runs} == {("ring", 2), ("overlap", 2)}
    assert all(len(steps) == measurement.PERIOD for steps in found.residuals)
    assert found.activation_bytes_per_sample is not None
    kinds = {(each.operation, each.algorithm, each.backend) for each in found.collectives}
    assert ("all_reduce", "ring", "gloo") in kinds
    # Workers of one host slow each other's collectives.
    assert {each.workers for each in found.collectives} == {2, 4}
    assert {each.codec for each in found.codec_timings} == {"bf16"}
    # With two threads each, the cores are enough for one of them.
    assert [(each.workers, len(each.step_seconds)) for each in found.side_by_side] == [
        (1, 1), (4, 4),
    ]  # fmt: skip
    assert not [*out.glob("side-by-side*")]

    plan = json.loads(file.read_text())
    assert plan["calibration_seconds"] > 0
    predictions = plan["predictions"]
    assert [(each["workers"], each["strategy"]) for each in predictions] == [
        (1, "single"), (2, "ring"), (4, "ring"),
    ]  # fmt: skip
    assert not any(each["extrapolated"] for each in predictions)


def test_shared_weights_are_measured_on_one_host_unless_the_job_forbids_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measurement, "RUN_SECONDS", 1e-6)
    for name in ("COMM", "COMM_IN_MEMORY"):
        quick = {**getattr(measurement, name), "sizes": "1k,1m", "seconds": "0.05"}
        monkeypatch.setattr(measurement, name, quick)
    monkeypatch.setattr(measurement, "hardware", lambda: {"cores": 2, "gpus": []})
    monkeypatch.setattr(cli_plan, "MEASURED_STRATEGIES", ("ring",))
    job = ["--model=softmax", "--data=plain_digits", "--batch-size=48", "--workers=2", "--advise"]
    for optimizer, strategies in (
        ("sgd", {"ring", "shared", "overlap"}),
        ("muon", {"ring", "overlap"}),
    ):
        out = tmp_path / optimizer
        assert main(["plan", *job, f"--optimizer={optimizer}", f"--out={out}"]) == 0
        known = calibrate([str(out)])
        assert {run.strategy for run in known.runs} == strategies
        backends = {timing.backend for timing in known.collectives}
        assert backends == ({"gloo", "shm"} if "shared" in strategies else {"gloo"})
        printed = capsys.readouterr()
        assert ("shared is left out (" in printed.err) is ("shared" not in strategies)


@pytest.mark.parametrize(
    ("most_workers", "cores", "workers"),
    [(2, 8, []), (8, 8, [8]), (8, 2, [8]), (8, 4, [4, 8]), (1000, 64, [16])],
)
def test_collectives_are_measured_with_as_many_workers_as_cores_and_as_planned(
    most_workers: int, cores: int, workers: list[int]
) -> None:
    assert measurement.comm_workers(most_workers, cores) == workers


@pytest.mark.parametrize(
    ("most_workers", "at_once", "workers"),
    [
        (1, 8, [1]),
        (2, 8, [1, 2]),
        (8, 2, [1, 2, 8]),
        (3, 2, [1, 2, 3]),
        (12, 64, [1, 2, 4, 8, 12]),
        (1000, 64, [1, 2, 4, 8, 16]),
    ],
)
def test_compute_is_measured_with_as_many_workers_as_cores_and_as_planned(
    most_workers: int, at_once: int, workers: list[int]
) -> None:
    assert measurement.side_by_side_workers(most_workers, at_once) == workers


@pytest.mark.parametrize(
    ("step_seconds", "steps"),
    [(0.0, 201), (0.001, 201), (0.01, 153), (0.1, 17), (1.0, 9), (100.0, 9)],
)
def test_a_run_has_whole_periods_besides_its_first_step(step_seconds: float, steps: int) -> None:
    assert measurement.run_steps(step_seconds) == steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "plan: give records, or --model NAME to measure it in short runs"),
        (["--model=lenett"], "unknown model 'lenett': did you mean lenet?"),
        (["--model=lenet", "--strategy=ringg"], "'ringg'"),
        (["--model=lenet", "-o", "evry=2"], "-o evry: none of the strategies has this option"),
        (["--model=lenet", "--cluster=nodes=0"], "nodes=1 to nodes=250"),
        (["--model=lenet", "--cluster=nodes=3"], "--cluster: must have two nodes"),
        (["--model=lenet", "--batch-size=1"], "--batch-size: must be at least 2"),
    ],
)
def test_an_invalid_job_is_rejected_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments, f"--out={tmp_path / 'runs'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "runs").exists()


def test_a_folder_with_records_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one").mkdir()
    assert main(["plan", "--model=lenet", f"--out={tmp_path}"]) == 2
    assert "is not empty" in capsys.readouterr().err
