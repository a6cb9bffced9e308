"""The batch script and the messages about a job, without SLURM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline import cli
from tests.support.commands import Ended, names_in

OWN = ["--model", "user_code:Plain", "--data", "user_code:data", "--strategy", "allreduce"]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole search path: where a test puts stand-ins for SLURM's programs."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def stand_in(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["slurm", "--dry-run", *words]) == 0
    return capsys.readouterr().out


def test_the_script_runs_train_under_srun_with_the_users_flags(
    tmp_path: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*OWN, "--out", str(tmp_path / "my runs"), "--name", "run", "--no-tensorboard"]
    given += ["-o", "algorithm=ring", "-o", "flat=false", "--quiet"]
    setup = ["--setup", "export GREETING='from the setup'"]
    script = dry_run(capsys, "--nodes", "3", "--cpus-per-task", "2", *setup, *given)
    stand_in(programs, "srun", 'printf "%s\\n" "$GREETING" "$@"')
    job = {"PATH": str(programs), "SLURM_CPUS_PER_TASK": "2"}
    done = subprocess.run(
        ["/bin/bash"], input=script, env=job, capture_output=True, text=True, check=True
    )
    greeting, *words = done.stdout.splitlines()
    assert greeting == "from the setup"
    assert words[0] == "--cpus-per-task=2"
    start = [sys.executable, "-m", "paceline", "train"]
    assert words[words.index(sys.executable) :] == [*start, *given]


def test_the_script_asks_for_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--nnodes", "3", "--ntasks-per-node", "2", "--time", "01:00:00", "--account", "me"]
    more = ["--sbatch", "mem=8G", "--sbatch=--exclusive"]
    script = dry_run(capsys, *asked, *more, *OWN, "--out", "my runs", "--name", "run")
    options = {line for line in script.splitlines() if line.startswith("#SBATCH ")}
    wanted = ["nodes=3", "ntasks-per-node=2", "time=01:00:00", "account=me", "mem=8G", "exclusive"]
    wanted += [f"chdir={Path.cwd()}", "output='my runs/run.slurm-%j.txt'", "job-name=run"]
    assert {f"#SBATCH --{option}" for option in wanted} < options


def test_a_run_is_resumed_with_as_many_workers_as_it_had(
    talkative_run: tuple[Path, Ended], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = talkative_run[0]
    script = dry_run(capsys, "--resume", str(folder), "--iterations", "20")
    assert "#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=2\n" in script
    assert f"train \\\n  --resume {folder} \\\n  --iterations 20\n" in script


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nodes", "0"], ["--nodes: must be a number above 0, got '0'"]),
        (["--time", "soon"], ["--time: must be minutes, hours:minutes:seconds or"]),
        (["--nodes", "2", "--nnodes", "3"], ["--nnodes: --nodes is 2, got 3"]),
        (
            ["--hosts", "a,b", "--master-port", "9"],
            [f"{flag}: set by SLURM" for flag in ("--master-port", "--hosts")],
        ),
        (["--nodes", "3", "--batch-size", "2"], ["--batch-size: must be at least 3, one sample"]),
        (["--nodes", "3", "--strategy", "single"], ["--strategy single: trains 1 worker, not 3"]),
        (["--model", "resnet", "--lr", "1"], ["unknown model 'resnet': did you mean"]),
    ],
)
def test_invalid_flags_are_rejected_before_submission(
    words: list[str], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["slurm", *OWN, *words, "--out", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(expected)
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(f"paceline: error: {beginning}")
    assert not names_in(tmp_path)


def test_without_sbatch_there_is_one_line_and_no_script(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["slurm", *OWN, "--out", str(tmp_path / "runs")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("paceline: error: sbatch is not installed on this machine: ")
    assert err.count("\n") == 1
    assert not names_in(tmp_path / "runs")


@pytest.mark.parametrize("taken", ["run", "run.sbatch"])
def test_an_existing_name_is_rejected(
    taken: str, programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(programs, "sbatch", "echo 1")
    (tmp_path / taken).mkdir()
    assert cli.main(["slurm", *OWN, "--out", str(tmp_path), "--name", "run"]) == 2
    assert "--name" in capsys.readouterr().err
    assert names_in(tmp_path) == {"programs", taken}


@pytest.mark.parametrize(
    ("scontrol", "state"),
    [
        ("echo JobId=7 JobState=TIMEOUT Reason=TimeLimit", "TIMEOUT"),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", "UNKNOWN"),
    ],
)
def test_a_job_that_leaves_no_result_is_a_failure(
    scontrol: str,
    state: str,
    programs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_in(programs, "sbatch", "echo '7;cluster'")
    stand_in(programs, "scontrol", scontrol)
    assert cli.main(["slurm", "--wait", *OWN, "--out", str(tmp_path), "--name", "run"]) == 1
    output = tmp_path / "run.slurm-7.txt"
    message = f"paceline: error: job 7 ended as {state} without a result: see {output}\n"
    assert capsys.readouterr().err == message


def test_ctrl_c_while_waiting_does_not_affect_the_job(
    programs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    stand_in(programs, "sbatch", "echo 7")
    stand_in(programs, "scontrol", "echo JobState=RUNNING")
    stand_in(programs, "scancel", f"echo >{tmp_path}/cancelled")
    monkeypatch.setattr("paceline.launch.slurm.time.sleep", interrupt)
    assert cli.main(["slurm", "--wait", *OWN, "--out", str(tmp_path), "--name", "run"]) == 130
    assert capsys.readouterr().err == "paceline: job 7 continues; stop it with `scancel 7`\n"
    assert not (tmp_path / "cancelled").exists()
