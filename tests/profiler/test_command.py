"""`paceline profile`: the command, its exit code and its records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.collection import collect
from paceline.cli import main
from paceline.profiler.command import describe_end
from paceline.records import PHASES

SCRIPT = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(400, 2), torch.zeros(400, 1))
for epoch in range(2):
    for inputs, targets in DataLoader(data, batch_size=4, num_workers=1):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
print("trained")
print("done", file=sys.stderr)
if "--raise" in sys.argv:
    raise ValueError("out of data")
if "--kill" in sys.argv:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(3 if "--fail" in sys.argv else 0)
"""


def profile(folder: Path, *command: str, flags: Sequence[str] = ("--quiet",)) -> int:
    return main(["profile", "--out", str(folder), "--name", "run", *flags, "--", *command])


def result(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return values


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return str(file)


def test_an_unchanged_script_gets_the_records_of_a_run(
    tmp_path: Path, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert profile(tmp_path, sys.executable, script, flags=()) == 0
    printed = capfd.readouterr()
    assert printed.out == "trained\n"
    assert printed.err.startswith("done\n")
    assert "forward" in printed.err
    assert str(tmp_path / "run" / "report.html") in printed.err
    values = result(tmp_path)
    assert (values["kind"], values["status"], values["iterations"]) == ("profile", "finished", 200)
    command = [sys.executable, script]
    assert values["config"] == {"command": command, "name": "run", "world_size": 1}
    assert values["samples"] == 800
    (worker,) = values["workers"]
    assert sum(worker["phases"].values()) == pytest.approx(worker["wall_seconds"], rel=0.01)
    assert all(worker["phases"][name] > 0 for name in ("input", "forward", "backward", "update"))
    assert set(worker["phases"]) == set(PHASES)
    # Building the model precedes the first step.
    startup = worker["startup_seconds"]
    assert startup["imports"] > 0
    assert 0 < startup["preparation"] <= worker["phases"]["other"]
    assert "start-up" in printed.err
    # With imports, which precede the wall time.
    assert values["command_seconds"] > values["wall_seconds"] + startup["imports"] / 2
    assert "after imports; the command took" in printed.err
    columns = {row.split()[0]: row.index(str(tmp_path)) for row in printed.err.splitlines()[-2:]}
    assert columns["records"] == columns["report"]
    assert worker["after_first"]["iterations"] == 199
    assert values["nodes"][0]["samples"] >= 2
    collection = collect(tmp_path / "run")
    (run,) = collection.runs
    assert run.settings.script == "train.py"
    # All its events are there.
    assert collection.skipped == []


def test_events_of_a_killed_rank_are_incomplete_although_the_command_succeeds(
    tmp_path: Path, script: str
) -> None:
    assert profile(tmp_path, "sh", "-c", f"{sys.executable} {script} --kill; true") == 0
    (skipped,) = collect(tmp_path / "run").skipped
    assert skipped.reason.startswith("events of rank 0 end at iteration")


@pytest.mark.parametrize(
    ("flag", "exit_code", "cause"),
    [("--fail", 3, "ended with exit code 3"), ("--kill", 137, "was killed by SIGKILL")],
)
def test_records_of_a_script_that_fails(
    tmp_path: Path, script: str, flag: str, exit_code: int, cause: str
) -> None:
    assert profile(tmp_path, sys.executable, script, flag) == exit_code
    values = result(tmp_path)
    assert (values["status"], values["cause"]) == ("failed", f"{sys.executable} {cause}")
    # A killed process leaves what it had written until half a second before.
    assert values["iterations"] > 0
    assert values["workers"][0]["wall_seconds"] > 0


@pytest.mark.parametrize(
    ("flags", "status", "cause"),
    [((), "finished", None), (("--raise",), "failed", "ValueError: out of data")],
)
def test_the_last_event_of_a_rank_is_its_end(
    tmp_path: Path, script: str, flags: Sequence[str], status: str, cause: str | None
) -> None:
    profile(tmp_path, sys.executable, script, *flags)
    # The exit of a process is not part of training, however it ends.
    assert not result(tmp_path)["workers"][0].get("unrecorded_seconds")
    last = json.loads((tmp_path / "run" / "events-0.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["status"], last["cause"]) == ("end", status, cause)


FAILS_FIRST = """
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("invalid flag")
dist.barrier()
"""


@pytest.mark.parametrize(
    ("flags", "exit_code", "why"),
    [
        ((), 0, "training must use"),
        (("--quiet",), 0, "training must use"),
        ((), 7, "the program failed before its first one"),
    ],
)
def test_a_command_without_training_is_passed_through(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    flags: Sequence[str],
    exit_code: int,
    why: str,
) -> None:
    program = f"echo out; echo err >&2; exit {exit_code}"
    assert profile(tmp_path, "sh", "-c", program, flags=flags) == exit_code
    printed = capfd.readouterr()
    assert printed.out == "out\n"
    own, line = printed.err.splitlines()
    assert own == "err"
    assert line.startswith(f"paceline: no training step was measured: {why}")
    # The name can be used again.
    assert not (tmp_path / "run").exists()


def test_ranks_that_fail_before_their_first_step_leave_no_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(FAILS_FIRST)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert profile(tmp_path, sys.executable, *launcher, str(path), flags=()) == 1
    assert "no training step was measured: the program failed before" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_rank_that_starts_again_replaces_its_records(tmp_path: Path, script: str) -> None:
    both = f"{sys.executable} {script} --fail; {sys.executable} {script}"
    assert profile(tmp_path, "sh", "-c", both) == 0
    values = result(tmp_path)
    assert values["iterations"] == 200
    text = "the ranks started 2 times: the result is that of the last start"
    assert values["warnings"] == [text]


@pytest.mark.parametrize("exit_code", [0, 3])
def test_a_folder_that_is_removed_keeps_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], exit_code: int
) -> None:
    remove = f"rm -r {tmp_path}/run; exit {exit_code}"
    assert profile(tmp_path, "sh", "-c", remove, flags=()) == exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert "the records are incomplete: cannot write" in line


def test_a_missing_command_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(tmp_path, "no-such-program") == 2
    assert "cannot run no-such-program" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--quiet"]) == 2
    assert "needs a COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("received", "status", "cause"),
    [
        ([signal.SIGUSR1], "failed", "train ended with exit code 3"),
        ([signal.SIGUSR1, signal.SIGTERM], "stopped", "stopped by SIGTERM"),
    ],
)
def test_only_signals_that_ask_to_end_stop_a_command(
    received: list[signal.Signals], status: str, cause: str
) -> None:
    assert describe_end("train", 3, received) == (status, cause)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    ready = tmp_path / "ready"
    # Takes a step, and exits with a code of its own, to show that it got the signal.
    program = (
        "import torch; weight = torch.ones(1, requires_grad=True); weight.sum().backward();"
        " torch.optim.SGD([weight], lr=0.1).step();"
        f" import pathlib, signal, sys, time; signal.signal({int(number)},"
        f" lambda *_: sys.exit(9)); pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    )
    flags = ["--out", str(tmp_path), "--name", "run", "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "profile", *flags, "--", sys.executable, "-c", program],
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, number)
        assert process.wait(timeout=60) == 9
    finally:
        process.kill()
        process.wait()
    assert result(tmp_path)["status"] == "stopped"
    assert result(tmp_path)["cause"] == f"stopped by {number.name}"
